"""Staying near a reference policy: estimators, a penalty in the reward, and controllers of its size."""
