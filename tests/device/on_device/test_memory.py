"""The peak of the device's memory is that of the loop by hand."""

from __future__ import annotations

from device.on_device.deep import by_hand, by_zae, peak
from zae.addons import EMAAddon, StateManagerAddon


def test_peak_is_that_of_the_loop_by_hand(tmp_path):
    """With a save as well; the average of EMAAddon takes as much as the weights."""
    allowed = peak(by_hand) + 0.02
    assert peak(by_zae) < allowed
    assert peak(lambda: by_zae(StateManagerAddon, save_path=tmp_path / "run")) < allowed
    assert peak(lambda: by_zae(EMAAddon)) < allowed + 1
