"""Code that runs in vLLM's worker processes, on whose path this folder is. It imports only Python, torch and vLLM."""
