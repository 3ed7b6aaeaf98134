"""The OpenAI API: one file per endpoint, and what they share (errors, bodies, validated fields, server-sent events)."""
