"""The engine: step loop, scheduler, block pool, runner and sampler. It knows token ids and tensors; it knows no NATS and no text."""
