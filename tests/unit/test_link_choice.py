"""Which codec a transfer uses: decisions worked out by hand, what is learned, and what the machines ask for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kakeya_zmq.codecs.link import HEADER, LINK_CODECS, CodecRates
from kakeya_zmq.codecs.probe import CodecProbe, value_bytes_of
from kakeya_zmq.compat import CACHE_FORMAT_VERSION
from kakeya_zmq.planner import LINK_COMPRESSION_CHOICES, LINK_PROBE_EVERY, MeasuredRates, decide_link_codec
from kakeya_zmq.protocol.effects import (
    Ask,
    AskProgressed,
    BindReceiver,
    BindSender,
    ConnectSender,
    Effect,
    RequestArrived,
    RequestKey,
)
from kakeya_zmq.protocol.prepare_values import IdAllocator, PreparationSettings
from kakeya_zmq.protocol.publish import Publisher, PublishSettings
from tests.chains import make_chain, make_parts
from tests.unit import test_publish, test_serve
from tests.unit.preparation_kit import FINGERPRINT, FULL, key_of, tokens_of
from tests.unit.test_prompt_preparation import desk, fetch_of, found, job_of, parts_of
from tests.unit.work_kit import Request, WorkHost, submission
from wire import limits
from wire.codec import pack_bitmap
from wire.errors import LocalProtocolError
from wire.ids import NodeId
from wire.messages import LinkCodec, Lookup, PublishGrant, PublishOffer, ValueBytes

NODE = NodeId("a")
FRAME_BYTES = 1_000_000
CODECS = {
    "zlib": CodecRates(encode_megabytes_per_second=20, decode_megabytes_per_second=300, ratio=1.6),
    "zstd": CodecRates(encode_megabytes_per_second=400, decode_megabytes_per_second=1000, ratio=1.5),
}


def rates_of(plain: float | None, compressed: float | None = None, node_id: NodeId = NODE) -> MeasuredRates:
    """Rates of a link in MB/s."""
    rates = MeasuredRates(codec_rates=lambda: CODECS)
    if plain is not None:
        rates.observe_link(node_id, int(plain * 1e6), 1000.0)
    if compressed is not None:
        rates.observe_link(node_id, int(compressed * 1e6), 1000.0, LinkCodec.ZSTD)
    return rates


def choice(rates: MeasuredRates, payload_bytes: int = 101_000_000, link_compression: str = "auto") -> LinkCodec:
    return decide_link_codec(link_compression, NODE, payload_bytes, rates, frame_bytes=FRAME_BYTES).codec


# --- auto ------------------------------------------------------------------------------------------------------------

# Nanoseconds a byte of payload, for encode, send, decode: zstd 2.5, 1000 / (1.5 x link), 1; zlib 50, 1000 / (1.6 x link),
# 3.33. The first of 101 frames passes all three, 100 follow at the pace of the slowest. Plain: 1000 / link for all 101.
BY_HAND = [
    (10.0, LinkCodec.ZLIB),  # plain 10.1 s; zlib 6.25 + 0.116 = 6.37 s; zstd 6.667 + 0.070 = 6.74 s
    (19.0, LinkCodec.ZSTD),  # zlib 5 + 0.086 = 5.09 s: held up by encoding; zstd 3.509 + 0.039 = 3.55 s
    (100.0, LinkCodec.ZSTD),  # plain 1.01 s; zstd 0.667 + 0.010 = 0.677 s; zlib is slower than the link
    (300.0, LinkCodec.ZSTD),  # plain 0.337 s; zstd 0.25 + 0.0057 = 0.256 s
    (399.0, LinkCodec.NONE),  # plain 0.2531 s; zstd 0.25 + 0.0052 = 0.2552 s
    (400.0, LinkCodec.NONE),  # as fast as the codec
    (999.0, LinkCodec.NONE),
]


@pytest.mark.parametrize(("link", "codec"), BY_HAND)
def test_the_fastest_way_by_hand(link: float, codec: LinkCodec) -> None:
    assert choice(rates_of(link)) is codec


def test_a_transfer_of_one_frame_overlaps_nothing() -> None:
    # At 300 MB/s one frame takes 3.33 ms plain and 2.5 + 2.22 + 1 = 5.72 ms with zstd.
    assert choice(rates_of(300.0), payload_bytes=FRAME_BYTES) is LinkCodec.NONE


@pytest.mark.parametrize("rates", [rates_of(None), rates_of(None, 50.0), rates_of(1000.0), rates_of(5000.0)])
def test_codecs_are_not_even_measured_where_none_can_pay(rates: MeasuredRates) -> None:
    def measure() -> Mapping[str, CodecRates]:
        raise AssertionError("measured")

    rates.codec_rates = measure
    assert choice(rates) is LinkCodec.NONE


def test_a_busy_processor_is_not_taken_for_a_slow_link() -> None:
    rates = rates_of(30.0)
    rates.same_host = {NODE}.__contains__
    assert choice(rates) is LinkCodec.NONE
    assert choice(rates, link_compression="zstd") is LinkCodec.ZSTD


def test_without_codec_rates_nothing_is_compressed() -> None:
    rates = rates_of(1.0)
    rates.codec_rates = dict
    assert choice(rates) is LinkCodec.NONE


@pytest.mark.parametrize("link", [None, 1.0, 5000.0])
@pytest.mark.parametrize("name", ["none", "zlib", "zstd"])
def test_a_configured_codec_is_used_on_every_link(name: str, link: float | None) -> None:
    assert choice(rates_of(link), link_compression=name).name.lower() == name


def test_a_decision_says_what_it_rests_on() -> None:
    decision = decide_link_codec("auto", NODE, 101_000_000, rates_of(100.0), frame_bytes=FRAME_BYTES)
    assert decision.describe() == "link to a (100.0 MB/s), 101.0 MB: zstd, estimated to be fastest"
    unknown = decide_link_codec("auto", NODE, 1_000_000, rates_of(None), frame_bytes=FRAME_BYTES)
    assert unknown.describe() == "link to a (unknown speed), 1.0 MB: none, the link is not measured"


# --- what is learned -------------------------------------------------------------------------------------------------


def test_plain_and_compressed_transfers_are_never_mixed() -> None:
    rates = rates_of(100.0, 140.0)
    assert (rates.plain_link(NODE), rates.compressed_link(NODE)) == (100.0, 140.0)
    assert rates.link_megabytes_per_second(NODE) == 140.0, "what a transfer may be expected to bring"
    rates.forget(NODE)
    assert rates.link_megabytes_per_second(NODE) is None
    assert rates.link_transfers == {}


def test_a_sender_that_compresses_slowly_is_found_out() -> None:
    rates = rates_of(100.0, 60.0)
    assert choice(rates) is LinkCodec.NONE
    decision = decide_link_codec("auto", NODE, 101_000_000, rates, frame_bytes=FRAME_BYTES)
    assert decision.reason == "zstd turned out slower: 60.0 MB/s"


@pytest.mark.parametrize(
    ("compressed", "usual", "probe"), [(140.0, LinkCodec.ZSTD, LinkCodec.NONE), (60.0, LinkCodec.NONE, LinkCodec.ZSTD)]
)
def test_now_and_then_the_other_way_is_measured_again(compressed: float, usual: LinkCodec, probe: LinkCodec) -> None:
    rates = rates_of(100.0, compressed)
    chosen: list[LinkCodec] = []
    for _ in range(2 * LINK_PROBE_EVERY):
        codec = choice(rates)
        chosen.append(codec)
        rates.observe_link(NODE, int((100.0 if codec is LinkCodec.NONE else compressed) * 1e6), 1000.0, codec)
    assert chosen.count(probe) == 2
    assert chosen.count(usual) == 2 * LINK_PROBE_EVERY - 2


@pytest.mark.parametrize(("before", "after", "expected"), [(40.0, 900.0, LinkCodec.NONE), (900.0, 40.0, LinkCodec.ZSTD)])
def test_a_link_that_changes_is_noticed(before: float, after: float, expected: LinkCodec) -> None:
    """A compressed transfer takes as long as the slower of zstd at 400 MB/s and the link with 1.5 times its bytes."""
    rates = MeasuredRates(codec_rates=lambda: CODECS)
    chosen: list[LinkCodec] = []
    for number in range(150):
        link = before if number < 50 else after
        codec = choice(rates)
        chosen.append(codec)
        rates.observe_link(NODE, int((link if codec is LinkCodec.NONE else min(400.0, 1.5 * link)) * 1e6), 1000.0, codec)
    assert chosen[-LINK_PROBE_EVERY:].count(expected) >= LINK_PROBE_EVERY - 1


# --- rates of codecs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_dtype", "version", "width"),
    [
        ("bfloat16", CACHE_FORMAT_VERSION, 2),
        ("float16", CACHE_FORMAT_VERSION, 2),
        ("float32", CACHE_FORMAT_VERSION, 4),
        ("bfloat16+float32", CACHE_FORMAT_VERSION, 1),
        ("bfloat16", CACHE_FORMAT_VERSION + "-int8", 1),
    ],
)
def test_the_width_of_values_follows_type_and_format(kv_dtype: str, version: str, width: ValueBytes) -> None:
    assert value_bytes_of(kv_dtype, version) == width


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32"])
def test_codecs_are_measured_once(kv_dtype: str) -> None:
    probe = CodecProbe(kv_dtype, CACHE_FORMAT_VERSION)
    rates = probe()
    assert set(rates) == set(LINK_CODECS) - {"none"}
    assert all(rate.ratio > 1 for rate in rates.values())
    assert all(min(rate.encode_megabytes_per_second, rate.decode_megabytes_per_second) > 0 for rate in rates.values())
    assert probe() is rates


def test_packed_parts_are_not_measured() -> None:
    assert CodecProbe("bfloat16", CACHE_FORMAT_VERSION + "-int8")() == {}


def test_numbers_and_names_agree_everywhere() -> None:
    assert {codec.name.lower(): codec.value for codec in LinkCodec} == LINK_CODECS
    assert set(LINK_COMPRESSION_CHOICES) == {"auto", *LINK_CODECS}
    assert HEADER.size == limits.LINK_FRAME_BYTES


@pytest.mark.parametrize("settings", [PreparationSettings, PublishSettings])
def test_an_unknown_choice_is_our_own_mistake(settings: type[PreparationSettings | PublishSettings]) -> None:
    with pytest.raises(LocalProtocolError, match="lz4"):
        settings(link_compression="lz4")


# --- what machines ask for and grant -----------------------------------------------------------------------------------

ZSTD = PreparationSettings(remote_minimum_tokens=8, link_compression="zstd", value_bytes=2)


@pytest.mark.parametrize(("settings", "codec", "width"), [(ZSTD, LinkCodec.ZSTD, 2), (None, LinkCodec.NONE, 1)])
def test_a_fetch_names_the_codec_it_wants(settings: PreparationSettings | None, codec: LinkCodec, width: int) -> None:
    d = desk(33, FULL, caches=["a"], settings=settings)
    d.feed(found(d.asks(Lookup)[0], parts_of(33, 32)))
    body = fetch_of(d)[1]
    assert (body.link_codec, body.value_bytes) == (codec, width)


@pytest.mark.parametrize(("link", "codec"), [(100.0, LinkCodec.ZSTD), (900.0, LinkCodec.NONE), (None, LinkCodec.NONE)])
def test_each_link_gets_its_own_choice(link: float | None, codec: LinkCodec) -> None:
    rates = rates_of(link)
    # A codec so fast that even the few bytes of this prompt gain.
    rates.codec_rates = lambda: {"zstd": CodecRates(600, 1e9, 100.0)}
    d = desk(33, FULL, caches=["a"], rates=rates)
    d.feed(found(d.asks(Lookup)[0], parts_of(33, 32)))
    # One frame: 1/600 + 1/(100 x 100) is less than 1/100.
    assert fetch_of(d)[1].link_codec is codec


def test_a_job_names_the_codec_it_wants() -> None:
    body = job_of(desk(33, FULL, workers=["w"], settings=ZSTD))[1]
    assert (body.link_codec, body.value_bytes) == (LinkCodec.ZSTD, 2)


def test_an_offer_names_the_codec_and_the_grant_decides() -> None:
    machine = Publisher(PublishSettings(link_compression="zlib", value_bytes=4), IdAllocator(itertools.count(1).__next__))
    log: list[Effect] = machine.publish(test_publish.parts_of(64), FINGERPRINT, [NODE], 5.0)
    (ask,) = [effect for effect in log if isinstance(effect, Ask)]
    assert isinstance(ask.body, PublishOffer)
    assert ask.body.link_codec is LinkCodec.ZLIB
    bits = pack_bitmap([True] * 4)
    grant = PublishGrant(wanted=bits, grant=test_publish.GRANT, credit_bytes=100)
    log = machine.on(AskProgressed(ask.ask, grant), 5.0)
    (connect,) = [effect for effect in log if isinstance(effect, ConnectSender)]
    assert (connect.grant.link_codec, connect.value_bytes) == (LinkCodec.NONE, 4)


def test_a_publish_goes_by_the_link_of_its_own_peer() -> None:
    rates = rates_of(100.0)
    rates.codec_rates = lambda: {"zstd": CodecRates(600, 1e9, 100.0)}
    for name, codec in (("a", LinkCodec.ZSTD), ("b", LinkCodec.NONE)):
        machine = Publisher(PublishSettings(), IdAllocator(itertools.count(1).__next__), rates=rates)
        log = machine.publish(test_publish.parts_of(64), FINGERPRINT, [NodeId(name)], 5.0)
        (ask,) = [effect for effect in log if isinstance(effect, Ask)]
        assert isinstance(ask.body, PublishOffer)
        assert ask.body.link_codec is codec


def test_a_cache_uses_the_codec_it_is_asked_for() -> None:
    peer = test_serve.Peer()
    parts = make_parts(make_chain(32))
    peer.hold(parts)
    info = peer.store.lease([part.meta.ref for part in parts], 0.0, 1000, fingerprint=test_serve.FINGERPRINT, owner="asker")
    body = replace(test_serve.fetch(info.lease_id, parts), link_codec=LinkCodec.ZSTD, value_bytes=2)
    bind = test_serve.only(peer.ask(body)[1], BindSender)
    assert (bind.link_codec, bind.value_bytes) == (LinkCodec.ZSTD, 2)
    offer = replace(test_serve.offer(make_parts(make_chain(48))), link_codec=LinkCodec.ZLIB)
    assert test_serve.only(peer.ask(offer)[1], BindReceiver).link_codec is LinkCodec.ZLIB


def test_a_worker_uses_the_codec_it_is_asked_for() -> None:
    host = WorkHost(FULL)
    tokens = tokens_of(40)
    key = RequestKey((bytes(16), 1))
    body = replace(submission(tokens), link_codec=LinkCodec.ZSTD, value_bytes=4)
    host.requests[key] = Request(body, tokens, "asker")
    host.send(RequestArrived(key, NodeId("asker"), (), body, host.now + 60, key_of("asker")))
    (bind,) = [effect for effect in host.effects if isinstance(effect, BindSender)]
    assert (bind.link_codec, bind.value_bytes) == (LinkCodec.ZSTD, 4)
    host.drain()
