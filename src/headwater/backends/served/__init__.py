"""The embedded engine in a process of its own (``rollout.placement: disaggregated``)."""
