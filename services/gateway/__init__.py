"""The gateway: speaks the OpenAI API to clients and token ids to workers, and owns each request until its end."""
