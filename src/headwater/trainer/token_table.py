"""``tokens.parquet``: the bytes of every token of a run's vocabulary.

Rollout files contain token ids. With this table, a reader shows what each of them stands for, down to single bytes,
without the model's tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headwater.core.disk import disk_full
from headwater.engine.stops import pieces_of

IS_EXACT = b"is_exact"
"""Key of the table's metadata: ``1`` if the text of a response is the concatenation of its tokens' bytes."""


def write_tokens(path: Path, tokenizer: Any) -> None:
    """Columns ``bytes`` and ``is_special``; the row number is the token id.

    A tokenizer that joins its tokens in another way gives the text of each token alone, which is then not exact.
    """
    known = pieces_of(tokenizer)
    vocabulary = tokenizer.get_vocab()
    size = max(vocabulary.values(), default=-1) + 1
    if known is not None:
        pieces = [known.of(token) for token in range(size)]
    else:
        pieces = [tokenizer.decode([token]).encode("utf-8", "replace") for token in range(size)]
    special = set(tokenizer.all_special_ids) | {
        token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special
    }
    table = pa.table(
        {
            "bytes": pa.array(pieces, pa.binary()),
            "is_special": pa.array([token in special for token in range(size)], pa.bool_()),
        }
    )
    write_table(table.replace_schema_metadata({IS_EXACT: b"0" if known is None else b"1"}), path, "the vocabulary")


def write_table(table: pa.Table, path: Path, what: str, rows_per_group: int | None = None) -> None:
    """Write a Parquet file under another name and rename it, so that a reader never sees an incomplete one."""
    temporary = path.with_name(f".{path.name}")
    try:
        pq.write_table(table, temporary, row_group_size=rows_per_group)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if (full := disk_full(error, path, what)) is not None:
            raise full from error
        raise
