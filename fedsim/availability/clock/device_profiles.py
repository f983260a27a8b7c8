"""Named devices and links, with measured inference times and bandwidths from public sources.

Devices: the mean time of an inference of MobileNetV2 (one image of 224 × 224 pixels), in milliseconds, as listed in the
benchmark of ncnn at commit a4d2ea1 (22 July 2026), the fastest of the runs listed for the device, on CPU or GPU:
https://github.com/Tencent/ncnn/blob/a4d2ea1d4422c9e849f166fd7a4aefb52f942f6a/benchmark/README.md

Links: mean downloads and uploads in megabits per second. 3G, 4G and 5G: Ofcom's report *Mobile Matters 2023*, measured
in the United Kingdom from October 2022 to March 2023, as cited by
https://www.ispreview.co.uk/index.php/2023/07/ofcom-publish-benchmarks-of-uk-5g-4g-and-3g-mobile-networks.html; home
broadband (the median line, in March 2023, as measured at the router, without a home's Wi-Fi):
https://www.ofcom.org.uk/phones-and-broadband/coverage-and-speeds/latest-home-broadband-performance-trends-revealed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedsim.core import checks
from fedsim.core.errors import ConfigError

SEPARATOR = "@"
MEGABIT = 125_000.0  # bytes


class DeviceBenchmark(NamedTuple):
    """A device: milliseconds of an inference of MobileNetV2, and the run of the benchmark in which it was measured."""

    inference: float
    run: str


class LinkProfile(NamedTuple):
    """A link: megabits per second to and from a client."""

    down: float
    up: float


DEVICE_PROFILES = {
    "snapdragon_8_gen_2": DeviceBenchmark(3.23, "phone of 2023, CPU, 4 threads"),
    "snapdragon_855_plus": DeviceBenchmark(4.68, "OnePlus 7T, CPU, 4 threads"),
    "snapdragon_765g": DeviceBenchmark(13.27, "CPU, 4 threads"),
    "snapdragon_821": DeviceBenchmark(22.38, "CPU, 4 threads"),
    "kirin_970": DeviceBenchmark(24.49, "CPU, 4 threads"),
    "snapdragon_675": DeviceBenchmark(26.08, "CPU, 2 threads"),
    "snapdragon_835": DeviceBenchmark(29.41, "CPU, 4 threads"),
    "snapdragon_660": DeviceBenchmark(34.54, "CPU, 8 threads"),
    "iphone_5s": DeviceBenchmark(57.47, "CPU, 2 threads"),
    "snapdragon_410": DeviceBenchmark(82.0, "CPU, 4 threads"),
    "jetson_orin_nano": DeviceBenchmark(3.83, "GPU"),
    "jetson_agx_xavier": DeviceBenchmark(6.5, "GPU"),
    "raspberry_pi_5": DeviceBenchmark(10.52, "CPU, 4 threads"),
    "jetson_nano": DeviceBenchmark(12.99, "GPU"),
    "raspberry_pi_4": DeviceBenchmark(61.88, "CPU, 4 threads"),
    "raspberry_pi_3": DeviceBenchmark(111.68, "model B+, CPU, 4 threads"),
    "raspberry_pi_zero_2": DeviceBenchmark(147.39, "CPU, 4 threads"),
}
LINK_PROFILES = {
    "3g": LinkProfile(5.9, 2.0),
    "4g": LinkProfile(29.5, 7.6),
    "5g": LinkProfile(129.9, 14.7),
    "broadband": LinkProfile(69.4, 18.4),
}


def device_profile_columns(names: Sequence[str], key: str) -> dict[str, list[float]]:
    """Columns of a table of named devices: `computation` in milliseconds, and `down` and `up`, bytes per second,
    where links are named.

    Args:
        names: of devices, each alone or with its link, as in 'jetson_nano@4g'.
        key: what messages call the setting.

    Raises:
        ConfigError: a name is unknown, or only some devices have a link.
    """
    devices, separators, links = zip(*(str(name).partition(SEPARATOR) for name in names), strict=True)
    profiles = [DEVICE_PROFILES[checks.check_choice(key, device, DEVICE_PROFILES)] for device in devices]
    columns = {"computation": [profile.inference for profile in profiles]}
    if not any(separators):
        return columns
    if not all(separators):
        linkless = devices[separators.index("")]
        raise ConfigError(f"{key} gives {linkless} no link, but others have one; give all devices a link, or none")
    link_profiles = [LINK_PROFILES[checks.check_choice(f"the link in {key}", link, LINK_PROFILES)] for link in links]
    return columns | {
        "down": [MEGABIT * profile.down for profile in link_profiles],
        "up": [MEGABIT * profile.up for profile in link_profiles],
    }
