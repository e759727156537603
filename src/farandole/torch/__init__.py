# The PyTorch binding's face: Horovod's names for torch tensors.
# Re-exports alone.
"""Import this where a script has `horovod.torch`."""

from __future__ import annotations
