"""Named tensors in bounded messages: all of them arrive, and no message lies its way in."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from codec_cases import normal
from starlings_compression.bundle import encoder, pack, unpack
from starlings_compression.codec import make_codec
from starlings_compression.errors import CodecError
from starlings_compression.feedback import ErrorFeedback
from starlings_compression.policy import Role, policy_for

LIMIT = 1 << 20
SPECS = {"int8:128", "exact"}


def model() -> dict[str, torch.Tensor | None]:
    tensors: dict[str, torch.Tensor | None] = {
        f"layers.{i}.{kind}": normal(*shape, seed=i)
        for i in range(40)
        for kind, shape in {"weight": (40, 40), "bias": (40,), "scale": ()}.items()
    }
    # Frozen, or not reached by this microbatch.
    tensors["layers.7.weight"] = None
    tensors["layers.39.scale"] = None
    tensors["größe"] = torch.arange(5)
    return tensors


def test_more_tensors_than_one_message_holds_all_arrive_in_order() -> None:
    tensors = model()
    encode = encoder(policy_for(Role.GRADIENT, "int8:128"))
    messages = list(pack(tensors.items(), encode, message_limit_bytes=8 << 10))
    assert len(messages) > 5
    assert max(map(len, messages)) <= 8 << 10
    found = [entry for message in messages for entry in unpack(message, limit_bytes=LIMIT, specs=SPECS)]
    assert [name for name, _ in found] == list(tensors)
    for name, tensor in found:
        sent = tensors[name]
        if sent is None or tensor is None:
            assert sent is tensor
        elif sent.numel() < 1024:
            # Biases and scales are exact.
            assert torch.equal(tensor, sent)
        else:
            assert float((tensor - sent).abs().max()) < 0.02


def test_one_large_message_is_the_same_as_many_small_ones_and_nothing_is_none() -> None:
    encode = encoder(policy_for(Role.GRADIENT, "int8:128"))
    (message,) = pack(model().items(), encode, message_limit_bytes=LIMIT)
    assert len(unpack(message, limit_bytes=LIMIT, specs=SPECS)) == len(model())
    assert list(pack([], encode, message_limit_bytes=LIMIT)) == []


def test_feedback_by_name_goes_into_a_bundle() -> None:
    states = {name: ErrorFeedback(make_codec("int4:64")) for name in "ab"}
    sent = {name: normal(500, seed=ord(name)) for name in "ab"}
    total = {name: torch.zeros(500) for name in "ab"}
    for _ in range(20):
        (message,) = pack(
            sent.items(),
            lambda name, tensor: states[name].encode(tensor, name=name),
            message_limit_bytes=LIMIT,
        )
        for name, tensor in unpack(message, limit_bytes=LIMIT, specs={"int4:64"}):
            assert tensor is not None
            total[name] += tensor
            states[name].commit()
    for name in "ab":
        assert float((total[name] / 20 - sent[name]).abs().max()) < 0.05


def test_what_cannot_be_sent_is_named() -> None:
    encode = encoder(policy_for(Role.GRADIENT, "int8:128"))
    with pytest.raises(CodecError, match=r"embedding: \d+ bytes do not fit into a message of 4096"):
        list(pack([("embedding", normal(100, 100))], encode, message_limit_bytes=4096))
    with pytest.raises(CodecError, match="weight: NaN"):
        list(pack([("weight", torch.tensor([float("nan")]))], encode, message_limit_bytes=4096))
    for name in ("", "x" * 513):
        with pytest.raises(CodecError, match="name"):
            list(pack([(name, None)], encode, message_limit_bytes=4096))


def test_limits_and_codecs_are_the_receivers() -> None:
    encode = encoder(policy_for(Role.GRADIENT, "int8:128"))
    (message,) = pack([("a", normal(40, 40)), ("b", normal(40, 40))], encode, message_limit_bytes=LIMIT)
    assert len(unpack(message, limit_bytes=2 * 6400, specs=SPECS)) == 2
    with pytest.raises(CodecError, match="limit of 6399"):
        unpack(message, limit_bytes=2 * 6400 - 1, specs=SPECS)
    with pytest.raises(CodecError, match="a: encoded as int8:128, expected exact or int4:64"):
        unpack(message, limit_bytes=LIMIT, specs={"int4:64", "exact"})
    (twice,) = pack([("a", None), ("a", None)], encode, message_limit_bytes=LIMIT)
    with pytest.raises(CodecError, match="two tensors"):
        unpack(twice, limit_bytes=LIMIT, specs=SPECS)


def test_mutated_bundles_are_bounded_tensors_or_codec_errors() -> None:
    rng = random.Random(5)
    encode = encoder(policy_for(Role.GRADIENT, "int8:8", small_tensor_elements=4))
    entries = [("a", normal(3)), ("bb", None), ("c", normal(5, 5)), ("d", torch.ones(2))]
    (good,) = pack(entries, encode, message_limit_bytes=LIMIT)
    for length in range(len(good)):
        with pytest.raises(CodecError):
            unpack(good[:length], limit_bytes=LIMIT, specs={"int8:8", "exact"})
    accepted = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(data))
            if rng.random() < 0.8:
                data[at] = rng.randrange(256)
            else:
                struct.pack_into(
                    "<Q", data, min(at // 8 * 8, len(data) - 8), rng.getrandbits(rng.choice((5, 64)))
                )
        try:
            found = unpack(data, limit_bytes=400, specs={"int8:8", "exact"})
        except CodecError:
            continue
        accepted += 1
        assert sum(t.numel() * t.element_size() for _, t in found if t is not None) <= 400
    assert accepted > 100
