"""What an engine is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.media import Media
from headwater.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for one response to a sequence of tokens.

    The randomness of sampling depends only on ``rng_key``, not on other requests in the batch.
    """

    request_id: str
    input_tokens: tuple[int, ...]
    sampling: SamplingParams
    rng_key: int
    given_tokens: tuple[int, ...] = ()
    """The beginning of the response, if it was generated earlier. Generation continues after it as if it had not been
    interrupted. These tokens count towards every limit of ``sampling``; the response holds only the new tokens."""
    session: str = ""
    """Requests with the same session share a prefix, such as the turns of an episode. A router sends them to the same
    server, which has the prefix in its cache, and never to one with older weights. Empty if there is no session."""
    media: Media = ()
    """Images and videos, and the tokens among ``input_tokens`` that stand for them."""

    def __post_init__(self) -> None:
        if not self.input_tokens:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")
        if self.media and max(each.end for each in self.media) > len(self.input_tokens):
            raise ValueError(
                f"request {self.request_id!r}: media stand after the end of its {len(self.input_tokens)} tokens"
            )
