"""Which samples a step trains on: a keyed permutation per epoch, computed pointwise, so nobody keeps a table.

A balanced Feistel network over the smallest even number of bits that holds the population, walked until it
lands inside (Black & Rogaway 2002, "Ciphers with arbitrary finite domains"). Equal arguments give equal
answers everywhere.
"""

from __future__ import annotations

from hashlib import blake2b

_ROUNDS = 4


def permuted(key: bytes, position: int, population: int) -> int:
    """Where the permutation of 0 .. population - 1 named by `key` sends `position`."""
    if not 0 <= position < population:
        raise ValueError(f"position {position} is not in a population of {population}")
    half_bits = max(1, ((population - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = position
    while True:
        left, right = value >> half_bits, value & mask
        for number in range(_ROUNDS):
            message = bytes((number,)) + right.to_bytes(8, "little")
            mixed = int.from_bytes(blake2b(message, digest_size=8, key=key).digest(), "little") & mask
            left, right = right, left ^ mixed
        value = left << half_bits | right
        # The domain is at most four times the population: a few turns suffice, and it stays a permutation.
        if value < population:
            return value


def samples_of_step(seed: int, population: int, step: int, batch: int) -> tuple[int, ...]:
    """The sample ids of optimizer step `step`, in microbatch order.

    Steps run through the population without gaps; each epoch has its own order. A step may span two epochs.

    Raises:
        ValueError: an empty population.
    """
    if population < 1:
        raise ValueError("there are no samples")
    first = step * batch
    ids = []
    for index in range(first, first + batch):
        epoch, position = divmod(index, population)
        ids.append(permuted(_key(seed, epoch), position, population))
    return tuple(ids)


def samples_at(seed: int, population: int, epoch: int, first: int, end: int) -> tuple[int, ...]:
    """The sample ids at positions `first` to `end` - 1 of an epoch's order."""
    return tuple(permuted(_key(seed, epoch), position, population) for position in range(first, end))


def epochs_of_step(population: int, step: int, batch: int) -> tuple[int, ...]:
    """The epoch of each sample of `samples_of_step`, so that (epoch, sample) names one use of a sample."""
    return tuple(index // population for index in range(step * batch, (step + 1) * batch))


def _key(seed: int, epoch: int) -> bytes:
    return b"starlings.samples" + seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
