"""How far the frames of our processors are from those of transformers' video processors, which need torchvision.

Run by the Python of an environment that has it. Prints differences by model, in steps of 8 bits.
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

SIZES = ((100, 62), (56, 56), (57, 113), (240, 180), (30, 40))
"""Width and height of the frames. Most are none of those that the models read, so frames are scaled up or down."""
NUM_FRAMES = 4


def differences(name: str) -> dict[str, float]:
    """The largest one of smooth frames, and the mean of frames of noise."""
    processor = load_processor(f"tiny:{name}")
    assert processor is not None
    with tempfile.TemporaryDirectory() as folder:
        for file, content in processor.files.items():
            Path(folder, file).write_text(content)
        theirs = AutoVideoProcessor.from_pretrained(folder)
    largest, means = [], []
    for size in SIZES:
        for frames, is_smooth in ((smooth(*size), True), (noise(*size), False)):
            ours = processor.inputs(MediaContent.of("video", [png(each) for each in frames], 2.0))
            given = torch.from_numpy(frames).permute(0, 3, 1, 2)
            made = theirs(videos=[given], do_sample_frames=False, return_tensors="pt")
            own = ours.get("pixel_values_videos", ours.get("pixel_values"))
            expected = made.get("pixel_values_videos", made.get("pixel_values"))
            steps = (own - expected.reshape(own.shape)).abs() * theirs.image_std[0] * 255
            (largest if is_smooth else means).append(float(steps.max() if is_smooth else steps.mean()))
    return {"smooth": max(largest), "noise": max(means)}


def smooth(width: int, height: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    waves = [
        [np.sin(6 * x / width + frame + color) * np.cos(5 * y / height) for color in range(3)]
        for frame in range(NUM_FRAMES)
    ]
    return (127 + 100 * np.array(waves).transpose(0, 2, 3, 1)).astype(np.uint8)


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, height, width, 3), dtype=np.uint8)


def png(frame: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(frame).save(stream, "PNG")
    return stream.getvalue()


if __name__ == "__main__":
    print(json.dumps({name: differences(name) for name in sys.argv[1:]}))  # noqa: T201  read by the test
