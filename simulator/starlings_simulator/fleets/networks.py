"""Access lines and distances between regions, for fleets that nobody has measured. A source per row; pure.

Rates are medians of what speed tests saw, which is less than what tariffs promise, and `delay_ms` is theirs too: to a
nearby server and back. Under load, lines without queue management add 50 to 300 ms to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """`delay_ms`: to the first exchange point and back."""

    down_mbit_per_s: float
    up_mbit_per_s: float
    delay_ms: float
    source: str


ACCESS: dict[str, Access] = {
    "fibre": Access(
        234,
        189,
        8,
        "Ookla 3rd quarter of 2023, AT&T Internet, in fierce-network.com 'Cox pulls ahead of Charter'; delay: Ookla "
        "June 2022, Verizon and Frontier, in telecompetitor.com 'Cox nears 200 Mbps'",
    ),
    "cable": Access(
        236,
        22,
        14,
        "Ookla 3rd quarter of 2023, Xfinity, in fierce-network.com 'Cox pulls ahead of Charter'; delay: Ookla June "
        "2022, Xfinity, in telecompetitor.com 'Cox nears 200 Mbps'",
    ),
    "dsl": Access(41, 12, 15, "Ookla June 2022, CenturyLink, in telecompetitor.com 'Cox nears 200 Mbps'"),
    "5g": Access(
        122,
        15,
        50,
        "Ookla 2023, fixed wireless of T-Mobile and Verizon (up 15 to 20), in 9to5mac.com of 2023-12-22; delay: Ookla "
        "3rd quarter of 2025, T-Mobile, in tvtechnology.com of 2025-12-15",
    ),
    "satellite": Access(
        105,
        15,
        40,
        "Ookla 1st quarter of 2025, Starlink, in rcrwireless.com 'Starlink speeds rebound'; delay: Ookla 4th quarter "
        "of 2021, by pcmag.com",
    ),
    "campus": Access(1000, 1000, 1, "Gigabit Ethernet (IEEE 802.3ab); the delay is an assumption"),
}

# Round trips in ms between regions of AWS, rounded, the mean of both directions: Skyplane (NSDI 2023), `profiles/
# latency.csv` of April 2022, ping from m5.large to m5.large. Each row has the distances to the regions before it.
_RTT_MS: dict[str, tuple[int, ...]] = {
    "af-south-1": (),
    "ap-east-1": (249,),
    "ap-northeast-1": (370, 53),
    "ap-northeast-2": (396, 74, 32),
    "ap-northeast-3": (369, 43, 8, 28),
    "ap-south-1": (156, 102, 130, 152, 114),
    "ap-southeast-1": (202, 35, 75, 96, 72, 59),
    "ap-southeast-2": (403, 129, 115, 148, 114, 141, 93),
    "ap-southeast-3": (217, 59, 89, 112, 85, 68, 15, 105),
    "ca-central-1": (221, 198, 158, 181, 154, 187, 222, 196, 235),
    "eu-central-1": (164, 196, 223, 249, 220, 114, 155, 246, 174, 89),
    "eu-north-1": (169, 213, 243, 272, 240, 133, 174, 291, 188, 106, 22),
    "eu-south-1": (186, 191, 215, 241, 212, 109, 147, 238, 161, 99, 11, 32),
    "eu-west-1": (155, 224, 214, 241, 214, 121, 179, 255, 193, 69, 22, 40, 33),
    "eu-west-2": (147, 200, 224, 250, 224, 110, 170, 264, 184, 77, 13, 32, 26, 11),
    "me-south-1": (141, 125, 158, 172, 145, 36, 94, 169, 104, 156, 84, 103, 92, 92, 83),
    "sa-east-1": (335, 325, 282, 308, 285, 299, 359, 308, 372, 125, 203, 223, 211, 180, 189, 271),
    "us-east-1": (220, 212, 168, 194, 159, 188, 237, 197, 258, 14, 90, 110, 99, 85, 77, 157, 116),
    "us-east-2": (229, 187, 145, 174, 144, 194, 216, 185, 226, 24, 99, 119, 109, 76, 86, 167, 125, 11),
    "us-west-1": (290, 150, 105, 135, 108, 224, 178, 136, 191, 78, 147, 174, 159, 136, 146, 217, 177, 60, 49),
    "us-west-2": (
        279,
        141,
        98,
        125,
        98,
        211,
        166,
        139,
        181,
        67,
        147,
        157,
        157,
        122,
        130,
        217,
        187,
        68,
        54,
        21,
    ),
}
REGIONS: tuple[str, ...] = tuple(_RTT_MS)
# Within a region, beside both lines' own delays: an assumption, a metropolitan exchange point on the way.
SAME_REGION_MS = 2.0
# Where nothing is said of where somebody is: the mean of the table, as if its regions were as likely.
UNKNOWN_MS = sum(map(sum, _RTT_MS.values())) / sum(map(len, _RTT_MS.values()))


def region_rtt_ms(one: str, other: str) -> float:
    """Between two regions of the table; UNKNOWN_MS where one is not in it (an own name, or none)."""
    if one == other:
        return SAME_REGION_MS
    if one not in _RTT_MS or other not in _RTT_MS:
        return UNKNOWN_MS
    first, second = sorted((REGIONS.index(one), REGIONS.index(other)))
    return float(_RTT_MS[REGIONS[second]][first])
