"""Headwater's own API: exact requests in; every token with its log-prob and version out, as it is generated."""
