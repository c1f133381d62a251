"""What OpenRLHF imports of flash-attn, which needs CUDA. Nothing of it is called on CPU."""
