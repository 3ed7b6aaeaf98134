"""The router: advises gateways which worker should get a prompt. Losing it costs cache hits, never requests."""
