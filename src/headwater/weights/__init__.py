"""Moving a policy version from the learner to an engine, streamed in buckets and verified by checksum.

``publish.py`` is the entry point. Each transport has one file with both of its ends:

- ``memory.py``: the engine runs in this process.
- ``shared_memory.py``: the engine runs in another process on this machine; two slots of one bucket each.
- ``file.py``: through a safetensors file.

A transport over the network (``collective.py``) would be one more file with the same two ends.
"""
