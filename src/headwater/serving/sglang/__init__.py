"""SGLang's native dialect: ``/generate`` and the calls with which training frameworks steer a server."""
