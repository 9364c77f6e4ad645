"""Convert images, figures and values of a histogram to what every sink can write."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor

from zae.errors import AddOnRequirement, ConfigError

__all__ = ["figure_pixels", "histogram_of", "image_pixels"]

_CHANNELS = (1, 3, 4)


def image_pixels(name: str, image: Any) -> np.ndarray[Any, Any]:
    """Return an image as an array of uint8 with the axes height, width and channel.

    A tensor has its channels first, as in torchvision; an array has them last, as in Pillow and matplotlib. Without a
    channel it is grey. Floats are between 0 and 1.
    """
    if find_spec("PIL") is None:
        raise AddOnRequirement("images need Pillow, which is not installed: pip install pillow")
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # A Pillow image, without importing it.
        image = np.asarray(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGBA"))
    has_channels_first = isinstance(image, Tensor)
    if has_channels_first:
        image = image.detach().float().cpu().numpy() if image.is_floating_point() else image.detach().cpu().numpy()
    if not isinstance(image, np.ndarray):
        raise ConfigError(f"image {name!r} is a {type(image).__name__}; give a tensor, an array or a Pillow image")
    pixels = image[..., None] if image.ndim == 2 else image
    if has_channels_first and image.ndim == 3:
        pixels = image.transpose(1, 2, 0)
    if pixels.ndim != 3 or pixels.shape[2] not in _CHANNELS or not pixels.size:
        axes = "(channels, height, width)" if has_channels_first else "(height, width, channels)"
        raise ConfigError(
            f"image {name!r} has the shape {tuple(image.shape)}; give {axes} with 1, 3 or 4 channels, or two axes"
        )
    return _as_bytes(name, pixels)


def _as_bytes(name: str, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if pixels.dtype == np.bool_:
        pixels = pixels.astype(np.float32)
    if np.issubdtype(pixels.dtype, np.floating):
        low = float(pixels.min())
        high = float(pixels.max())
        if not (low >= 0 and high <= 1):
            raise ConfigError(
                f"image {name!r} has floats between {low:g} and {high:g}; scale them to 0..1, or give uint8"
            )
        pixels = (pixels * 255).round().astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise ConfigError(f"image {name!r} has the dtype {pixels.dtype}; give uint8, or floats between 0 and 1")
    return np.ascontiguousarray(pixels)


def figure_pixels(name: str, figure: Any) -> np.ndarray[Any, Any]:
    """Draw a matplotlib figure, which stays open, and return its pixels."""
    if not hasattr(figure, "savefig") or not hasattr(figure, "canvas"):
        raise ConfigError(f"figure {name!r} is a {type(figure).__name__}; give a matplotlib Figure, or log_image")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    from PIL import Image  # matplotlib requires it.

    with Image.open(file) as image:
        return image_pixels(name, image)


def histogram_of(name: str, values: Any, bins: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the counts and the edges of a histogram of the finite values, as ``numpy.histogram`` does."""
    array = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values)
    try:
        finite = array.astype(np.float64).ravel()
    except (TypeError, ValueError):
        kind = type(values).__name__
        raise ConfigError(f"histogram {name!r} is a {kind}; give a tensor or an array of numbers") from None
    finite = finite[np.isfinite(finite)]
    if not finite.size:
        raise ConfigError(f"histogram {name!r} has no finite value, of {array.size}")
    return np.histogram(finite, bins)
