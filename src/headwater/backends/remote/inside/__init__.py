"""The program of a server that a run starts, in the Python of vLLM or SGLang."""
