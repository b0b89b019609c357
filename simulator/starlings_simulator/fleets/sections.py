"""The sections of a fleet file, one class each: keys, defaults, ranges. The comments document the keys. Pure."""

from __future__ import annotations

import difflib
import math
import re
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from starlings_job.devices import DEVICES, squeezed
from starlings_job.sections import Bytes, Real, Section, Whole
from starlings_simulator.fleets.networks import ACCESS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
WORKERS_LIMIT = 100_000
PLACES_LIMIT = 512


def _named(value: object) -> object:
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} is no name: 1 to 63 of A-Z a-z 0-9 . _ - beginning with a letter or digit"
        )
    return value


def near(name: str, names: list[str]) -> str:
    """ " (did you mean 'cable'?)", or ""."""
    found = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


Name = Annotated[str, BeforeValidator(_named)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e15)]
Delay = Annotated[float, Field(strict=True, ge=0, le=60_000)]


def _class(value: object) -> object:
    if not isinstance(value, str):
        return value
    if squeezed(value) not in DEVICES:
        raise ValueError(
            f"{value!r} is no known class{near(squeezed(value), sorted(DEVICES))}; known are "
            f"{', '.join(sorted(DEVICES))}; for another device leave class out and write memory and tflops"
        )
    return squeezed(value)


def _access(value: object) -> object:
    if isinstance(value, str) and value not in ACCESS:
        raise ValueError(
            f"{value!r} is no known access line{near(value, sorted(ACCESS))}; known are {', '.join(sorted(ACCESS))}; "
            "for another line write uplink_mbit_per_s, downlink_mbit_per_s and delay_ms"
        )
    return value


class Line(Section):
    """A link to the outside: of a site, shared by all its workers, or of one worker."""

    # One of the access lines that are known; what stands beside it replaces its figures.
    access: Annotated[str | None, BeforeValidator(_access)] = None
    # Mbit/s to and from the outside; without limit when neither they nor `access` are given.
    uplink_mbit_per_s: Positive | None = None
    downlink_mbit_per_s: Positive | None = None
    # Milliseconds to the first exchange point and back; 0 when neither it nor `access` is given.
    delay_ms: Delay | None = None
    # Where it is: a region of the table of round trips (such as "eu-west-1"), or a name of one's own.
    region: Annotated[str, BeforeValidator(_named)] = "unknown"


class FleetSection(Section):
    # For headings.
    name: str = "fleet"
    # What a kilowatt-hour costs, for workers whose price is not given; left out: energy costs nothing.
    price_per_kwh: Annotated[float, Field(strict=True, ge=0, le=1e6)] | None = None
    # What prices are in.
    currency: str = Field(default="USD", min_length=1, max_length=8)


class WorkersSection(Line):
    # What its workers are called, with a number behind it where there are several; the class when left out.
    name: Name | None = None
    # Kind of device; gives memory, speed and watts as far as they are not given here.
    class_: Annotated[str | None, BeforeValidator(_class)] = Field(default=None, alias="class")
    count: Whole = Field(default=1, ge=1, le=WORKERS_LIMIT)
    # The site of [sites.NAME] whose link they share; left out: each has a line of its own.
    site: Name | None = None
    # Memory for training, per worker: "24GB", "20GiB".
    memory: Bytes | None = None
    # Arithmetic that training really gets, in 10^12 operations per second: about 0.3 to 0.5 of a device's peak.
    tflops: Positive | None = None
    # Factor on the speed, for a slower or overclocked one.
    speed: Positive = 1.0
    # Measured seconds of one microbatch through a block of each kind ("embed", "layer", "head"); replaces the speed.
    forward_seconds: dict[str, Positive] | None = None
    # The same for backward; twice the forward when left out.
    backward_seconds: dict[str, Positive] | None = None
    # What an hour of one worker costs; left out: its energy at [fleet] price_per_kwh, or unknown.
    price_per_hour: Annotated[float, Field(strict=True, ge=0, le=1e6)] | None = None
    # What one worker draws at work.
    watts: Positive | None = None
    # How long a worker stays on average, before it comes back or not; left out: it stays.
    lifetime_hours: Positive | None = None

    @model_validator(mode="after")
    def _speed_is_known(self) -> Self:
        if self.class_ is None and self.memory is None:
            raise ValueError('needs class (such as "rtx3090"), or memory (such as "24GB") beside its speed')
        if self.class_ is None and self.tflops is None and self.forward_seconds is None:
            raise ValueError('needs class (such as "rtx3090"), tflops, or forward_seconds')
        if self.backward_seconds is not None and set(self.backward_seconds) != set(
            self.forward_seconds or {}
        ):
            raise ValueError("backward_seconds must have the kinds of blocks that forward_seconds has")
        return self

    @model_validator(mode="after")
    def _either_site_or_line(self) -> Self:
        own = [
            key
            for key in ("access", "uplink_mbit_per_s", "downlink_mbit_per_s", "delay_ms")
            if getattr(self, key) is not None
        ]
        if self.site is not None and (own or self.region != "unknown"):
            own += ["region"] * (self.region != "unknown")
            raise ValueError(
                f"site = {self.site!r} has the link and the region: move {', '.join(own)} to [sites.{self.site}]"
            )
        return self


class MatrixSection(Section):
    """Figures for pairs. `names` are sites, workers without a site, or regions; what is most precise counts."""

    names: tuple[Name, ...] = Field(min_length=1, max_length=PLACES_LIMIT)
    # A row per name, a column per name, in the same order; row: from, column: to.
    matrix: tuple[tuple[Real, ...], ...]

    @field_validator("matrix")
    @classmethod
    def _numbers(cls, value: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        for row in value:
            for number in row:
                if not (math.isfinite(number) and 0 <= number <= 1e9):
                    raise ValueError(f"has {number:g}; write 0 or more")
        return value

    @model_validator(mode="after")
    def _square(self) -> Self:
        if len(set(self.names)) != len(self.names):
            raise ValueError("names has a name twice")
        count = len(self.names)
        if len(self.matrix) != count or any(len(row) != count for row in self.matrix):
            shape = f"{len(self.matrix)} rows of {sorted({len(row) for row in self.matrix})}"
            raise ValueError(
                f"matrix has {shape} numbers for {count} names; write {count} rows of {count} numbers"
            )
        return self

    def between(self, sources: tuple[str, ...], targets: tuple[str, ...]) -> float | None:
        """The figure for the first pair of names that it has, most precise names first."""
        for one in sources:
            for other in targets:
                if one in self.names and other in self.names:
                    return float(self.matrix[self.names.index(one)][self.names.index(other)])
        return None


class FleetSpec(Section):
    """A checked fleet file."""

    fleet: FleetSection = FleetSection()
    sites: dict[Name, Line] = Field(default={}, max_length=WORKERS_LIMIT)
    workers: tuple[WorkersSection, ...] = ()
    # Round trips in milliseconds, in place of the table's.
    rtt_ms: MatrixSection | None = None
    # What a pair's path carries in Mbit/s, where that is less than both links; 0: no more than the links.
    path_mbit_per_s: MatrixSection | None = None

    @model_validator(mode="after")
    def _sites_are_there(self) -> Self:
        used = {group.site for group in self.workers if group.site is not None}
        for site in sorted(used - set(self.sites)):
            known = f"; there are {', '.join(sorted(self.sites))}" if self.sites else ""
            raise ValueError(
                f"workers name the site {site!r}, which is not there{near(site, sorted(self.sites))}{known}; "
                f"write [sites.{site}]"
            )
        total = sum(group.count for group in self.workers)
        if not total:
            raise ValueError('has no workers: write [[workers]] with class = "rtx3090" and count = 4, say')
        if total > WORKERS_LIMIT:
            raise ValueError(f"has {total} workers; at most {WORKERS_LIMIT} can be planned")
        return self
