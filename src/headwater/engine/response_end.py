"""Where a response ends by what it says."""

from __future__ import annotations

from headwater.core.protocols import Tokenizer
from headwater.engine.sequence import Sequence
from headwater.engine.stop_strings import find_stop


def cut_at_stop(tokenizer: Tokenizer, sequence: Sequence) -> bool:
    """End a sequence at its first stop string or stop token; what was drawn beyond is dropped."""
    stops = sequence.request.sampling.stop_strings
    minimum = sequence.request.sampling.min_new_tokens
    num_tokens = len(sequence.tokens)
    checked = min(max(sequence.num_checked, minimum), num_tokens)
    by_string = find_stop(tokenizer, sequence.tokens, checked, stops) if stops else None
    # The device ends a row at a stop token, so only the last one can be one; it watches only so many, though.
    first = checked if sequence.has_many_stop_ids else max(num_tokens - 1, minimum)
    fresh = range(first, num_tokens)
    by_token = next((place + 1 for place in fresh if sequence.tokens[place] in sequence.stop_ids), None)
    ends = [each for each in (by_string, by_token) if each is not None]
    sequence.num_checked = num_tokens
    if not ends:
        return False
    sequence.truncate(min(ends))
    sequence.has_stopped = True
    return True
