"""The SGLang API: ``/generate``, and the calls with which training frameworks control a server."""
