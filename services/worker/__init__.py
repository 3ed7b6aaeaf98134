"""The worker: pulls requests into one continuous batch and streams token ids back. It never sees text."""
