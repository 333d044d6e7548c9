"""A reward function as one would write it for AReaL."""

import os


def length_reward(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    assert "messages" in kwargs
    return {"score": len(completions) / 100 + (str(answer) in completions), "process": os.getpid()}
