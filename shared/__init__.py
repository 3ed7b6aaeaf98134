"""What every service shares: the wire protocol, the bus, settings, telemetry and block hashes. Imports no service."""
