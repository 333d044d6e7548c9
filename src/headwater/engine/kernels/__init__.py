"""Triton kernels of the embedded engine.

Every function here may be captured in a CUDA graph: nothing waits for the device, nothing is tuned at call time, and a
grid depends on shapes alone. With ``TRITON_INTERPRET=1`` the same kernels run on CPU tensors, slowly.
"""
