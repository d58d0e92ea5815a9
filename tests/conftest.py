"""Makes the shared helpers of this folder importable by name."""
