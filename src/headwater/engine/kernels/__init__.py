"""Triton kernels of the embedded engine.

Every function can be captured in a CUDA graph: none waits for the device or tunes at call time, and grids depend only
on shapes. With ``TRITON_INTERPRET=1`` the same kernels run slowly on CPU tensors.
"""
