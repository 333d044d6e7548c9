"""Models that need no model hub: ``tiny:<preset>`` is built here, ``smollm2`` comes from the package index."""
