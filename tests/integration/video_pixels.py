"""How far the frames of our processors are from those of transformers' video processors, which need torchvision.

Run by the Python of an environment that has it. Prints, by model, the largest difference in steps of 8 bits.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path

try:
    import numpy as np
    import torch
    from PIL import Image
    from transformers import AutoVideoProcessor

    from headwater.core.media import MediaContent
    from headwater.models.load import load_processor
except ImportError as error:
    print(f"NO PACKAGE: {error}")  # noqa: T201  read by the test
    sys.exit(0)

SIZES = ((100, 62), (56, 56), (57, 113), (240, 180))
"""Width and height of the frames. Most are none of those that the models read, so frames are scaled up or down."""
NUM_FRAMES = 4


def difference(name: str) -> float:
    """The largest one over all sizes, of random frames."""
    processor = load_processor(f"tiny:{name}")
    assert processor is not None
    with tempfile.TemporaryDirectory() as folder:
        for file, content in processor.files.items():
            Path(folder, file).write_text(content)
        theirs = AutoVideoProcessor.from_pretrained(folder)
    generator = np.random.default_rng(0)
    largest = 0.0
    for width, height in SIZES:
        frames = generator.integers(0, 256, (NUM_FRAMES, height, width, 3), dtype=np.uint8)
        ours = processor.inputs(MediaContent.of("video", [png(each) for each in frames], 2.0))
        key = "pixel_values_videos" if "pixel_values_videos" in ours else "pixel_values"
        made = theirs(videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt")
        expected = made[key if key in made else "pixel_values_videos"]
        deviation = (ours[key] - expected.reshape(ours[key].shape)).abs().max()
        largest = max(largest, float(deviation) * theirs.image_std[0] * 255)
    return largest


def png(frame: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(frame).save(stream, "PNG")
    return stream.getvalue()


if __name__ == "__main__":
    print(json.dumps({name: difference(name) for name in sys.argv[1:]}))  # noqa: T201  read by the test
