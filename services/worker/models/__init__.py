"""Models: one decoder described by data, and loaders for its weights. It knows no scheduler and no wire protocol."""
