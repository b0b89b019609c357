"""A connection to the broker that lives beside everything else: a thread of its own, which nobody ever waits for.

    client = BusClient(parse_bus_url(url), client_id, identity, standing=..., will=..., on_message=...)
    client.start()
    client.publish(str(Topic(job, Kind.EVENT)), payload, qos=1)
    client.refresh()
    client.close(final=...)

`publish` puts a message into a bounded queue and returns. What is retained and changes (a worker's state, the plan) is
asked for instead, at each connection and after each `refresh`: so it is always the newest, and of the session in which
it is published. Each connection has an event loop of its own, made for it and
closed with it: nothing of a dead one is left behind, and on Windows it can be a selector loop (which paho's sockets
need) whatever the process uses elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from starlings_protos.bus.address import BusAddress
from starlings_protos.bus.link import STEADY_AFTER_S, Health, Link
from starlings_protos.bus.outbox import Outbox, Outgoing
from starlings_protos.bus.payloads import PACKET_LIMIT_BYTES
from starlings_protos.errors import clean_text
from starlings_protos.identity import Identity
from starlings_protos.private_files import write_private

logger = logging.getLogger(__name__)
# aiomqtt and paho have their say in the reasons that we log.
_silent = logging.getLogger(f"{__name__}.mqtt")
_silent.setLevel(logging.CRITICAL + 1)

# The broker gives up a silent client after 1.5 times this, and publishes its will; a silent broker is given up after
# about twice this. Longer means fewer pings of idle clients, and later news of frozen ones.
KEEPALIVE_S = 20
# For each answer of the broker. A broker that is slower is left, and tried again later.
ANSWER_WITHIN_S = 10.0
# Closing may take this long, with the last words.
CLOSE_WITHIN_S = 3.0
REASON_LIMIT_CHARACTERS = 200
# After so many connections in a row that did not last, somebody else of the job may be using our client id: the broker
# then ends ours. From there on ours is one that nobody can guess.
SHORT_LIMIT = 3

# From the session's number, a new random one per connection (64 bits, not 0).
Words = Callable[[int], Sequence[Outgoing]]
Will = Callable[[int], Outgoing]
# Topic, payload, whether it had been retained before we came.
OnMessage = Callable[[str, bytes, bool], None]


def no_words(session: int) -> Sequence[Outgoing]:
    return ()


class BusClient:
    """Publishes and listens, whatever becomes of the broker. All methods may be called from any thread."""

    def __init__(
        self,
        address: BusAddress,
        client_id: str,
        identity: Callable[[], Identity],
        *,
        standing: Words = no_words,
        will: Will | None = None,
        subscriptions: Sequence[tuple[str, int]] = (),
        on_message: OnMessage = lambda topic, payload, retained: None,
        announce: Callable[[str], None] = logger.info,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            client_id: a second connection with the same one ends the first. Where that seems to happen again and
                again, a random one is used.
            identity: asked at each connection, so that a renewed certificate counts from the next one on.
            standing: how things are now, as messages; called on the bus's thread, and must not block.
            will: what the broker shall say for us when the connection ends without a goodbye.
            subscriptions: topic filters with their QoS.
            on_message: called on the bus's thread; must not block. Topic, payload, whether the broker had kept it.
            announce: gets a line when the bus has come, gone, or come back; on the bus's thread.
        """
        self._address = address
        self._client_id = client_id
        self._identity = identity
        self._standing = standing
        self._will = will
        self._subscriptions = tuple(subscriptions)
        self._on_message = on_message
        self._announce = announce
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._stale = False
        self._final: Words = no_words
        # Connections in a row that have not lasted yet. Of the bus's thread alone.
        self._short = 0
        self._link = Link(connected=False, since_s=time.monotonic())
        # Set in the loop of the present connection whenever it should look around.
        self._wake: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False) -> None:
        """Queues a message; never blocks, never fails."""
        with self._lock:
            self._outbox.put(Outgoing(topic, payload, qos, retain))
        self._look()

    def refresh(self) -> None:
        """How things stand has changed: it is asked for and published, once for all calls until then."""
        with self._lock:
            self._stale = True
        self._look()

    def health(self) -> Health:
        """Times are of `time.monotonic()`."""
        with self._lock:
            return self._link.health(self._outbox.dropped)

    def close(self, final: Words = no_words, within_s: float = CLOSE_WITHIN_S) -> None:
        """Publishes what waits and the last words if the broker is there, and disconnects in order, so that it
        publishes no will. Returns after about `within_s` at the latest.
        """
        self._final = final
        self._closing.set()
        self._look()
        if self._thread.is_alive():
            self._thread.join(within_s)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                reason = self._connection()
            except Exception as error:
                # Whatever is wrong with the bus or with us here is no reason to end a training run.
                logger.debug("the bus's connection failed", exc_info=True)
                reason = f"{type(error).__name__}: {error}"
            if self._closing.is_set():
                return
            self._change(self._link.closed(time.monotonic(), clean_text(reason, REASON_LIMIT_CHARACTERS)))
            self._closing.wait(self._link.pause_s(self._rng))

    def _connection(self) -> str:
        """One connection from beginning to end; returns why it ended."""
        made: list[aiomqtt.Client] = []
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                loop = runner.get_loop()
                loop.set_default_executor(_Daemons())
                # Of futures that failed together with the one that we waited for.
                loop.set_exception_handler(lambda _, context: logger.debug("%s", context))
                return runner.run(self._serve(made))
        except (aiomqtt.MqttError, OSError, TimeoutError) as error:
            return _in_words(error)
        finally:
            with self._lock:
                self._wake = None
            for client in made:
                # A socket whose peer hangs is still open: aiomqtt has no way to end it at once.
                if (socket := client._client.socket()) is not None:
                    socket.close()

    async def _serve(self, made: list[aiomqtt.Client]) -> str:
        session = secrets.randbits(64) or 1
        client = self._client(session)
        made.append(client)
        closing = asyncio.create_task(self._until_closing())
        entering = asyncio.create_task(client.__aenter__())
        # Connecting may block for seconds in a thread that cannot be stopped; who closes does not wait for it.
        await asyncio.wait({closing, entering}, return_when=asyncio.FIRST_COMPLETED)
        if not entering.done():
            return "closed"
        await entering
        listening = asyncio.create_task(self._listen(client))
        talking = asyncio.create_task(self._talk(client, session))
        try:
            # aiomqtt goes on waiting for answers when the connection is long gone: who talks is told by who listens.
            await asyncio.wait({listening, talking}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)
                # Raises the reason.
                await listening
            await talking
        finally:
            if not listening.done():
                await client.__aexit__(None, None, None)
        return "closed"

    async def _talk(self, client: aiomqtt.Client, session: int) -> None:
        """All that is sent over one connection; returns when we close."""
        await self._subscribe(client)
        self._change(self._link.opened(time.monotonic()))
        self._short += 1
        steady = asyncio.create_task(self._steady())
        try:
            await self._speak(client, session)
        finally:
            steady.cancel()

    def _client(self, session: int) -> aiomqtt.Client:
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = PACKET_LIMIT_BYTES
        last = self._will(session) if self._will is not None else None
        return aiomqtt.Client(
            self._address.host,
            self._address.port,
            identifier=(
                self._client_id if self._short < SHORT_LIMIT else f"{self._client_id}-{secrets.token_hex(8)}"
            ),
            protocol=aiomqtt.ProtocolVersion.V5,
            will=None if last is None else _will(last),
            clean_start=True,
            timeout=ANSWER_WITHIN_S,
            keepalive=KEEPALIVE_S,
            properties=properties,
            tls_context=_tls_context(self._identity()) if self._address.tls else None,
            queue_type=self._queue_type(),
            logger=_silent,
        )

    def _queue_type(self) -> Any:
        """Hands each message over where aiomqtt would queue it: a queue would grow without bound, or lose messages,
        whenever the broker is faster than the tasks that aiomqtt needs for each.
        """
        hand_over = self._hand_over

        class HandsOver(asyncio.Queue[aiomqtt.Message]):
            def put_nowait(self, item: aiomqtt.Message) -> None:
                hand_over(item)

        return HandsOver

    def _hand_over(self, message: aiomqtt.Message) -> None:
        try:
            self._on_message(str(message.topic), bytes(message.payload), message.retain)
        except Exception:
            logger.exception("a message on %s could not be handled", message.topic)

    async def _listen(self, client: aiomqtt.Client) -> None:
        """Until the connection ends; raises why."""
        async for _ in client.messages:
            pass  # handed over already

    async def _subscribe(self, client: aiomqtt.Client) -> None:
        if not self._subscriptions:
            return
        answers = await client.subscribe(list(self._subscriptions))
        refused = [
            topic
            for (topic, _), answer in zip(self._subscriptions, answers, strict=True)
            if getattr(answer, "value", 0) >= 128
        ]
        if refused:
            raise aiomqtt.MqttError(f"the broker does not let us read {', '.join(refused)}")

    async def _speak(self, client: aiomqtt.Client, session: int) -> None:
        """Publishes what comes, one after the other, until everything is said and we close."""
        changed = asyncio.Event()
        with self._lock:
            self._wake = (asyncio.get_running_loop(), changed)
            self._stale = True
        while True:
            changed.clear()
            with self._lock:
                stale, self._stale = self._stale, False
                message = None if stale else self._outbox.take()
            if stale:
                await self._say(client, self._standing(session))
            elif message is not None:
                await self._send(client, message)
            elif self._closing.is_set():
                await self._say(client, self._final(session))
                return
            else:
                await changed.wait()

    async def _say(self, client: aiomqtt.Client, words: Sequence[Outgoing]) -> None:
        for message in words:
            await _publish(client, message)

    async def _send(self, client: aiomqtt.Client, message: Outgoing) -> None:
        try:
            await _publish(client, message)
        except BaseException:
            with self._lock:
                self._outbox.put_back(message)
            raise

    async def _steady(self) -> None:
        await asyncio.sleep(STEADY_AFTER_S)
        if self._short <= SHORT_LIMIT:
            self._short = 0
        self._change(self._link.steady(time.monotonic()))

    async def _until_closing(self) -> None:
        changed = asyncio.Event()
        with self._lock:
            self._wake = (asyncio.get_running_loop(), changed)
        while not self._closing.is_set():
            await changed.wait()
            changed.clear()

    def _look(self) -> None:
        with self._lock:
            if self._wake is not None:
                loop, changed = self._wake
                # A loop that has just been closed has nothing to look at.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(changed.set)

    def _change(self, change: tuple[Link, str]) -> None:
        with self._lock:
            self._link, line = change
        if line:
            self._announce(f"The bus at {self._address} is {line}.")


class _Daemons(ThreadPoolExecutor):
    """A thread per task that nobody waits for: neither a loop that is closed nor the end of the process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="bus-connecting", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


async def _publish(client: aiomqtt.Client, message: Outgoing) -> None:
    properties = _expiry(PacketTypes.PUBLISH, message)
    await client.publish(message.topic, message.payload, message.qos, message.retain, properties)


def _will(message: Outgoing) -> aiomqtt.Will:
    properties = _expiry(PacketTypes.WILLMESSAGE, message)
    return aiomqtt.Will(message.topic, message.payload, message.qos, message.retain, properties)


def _expiry(packet: int, message: Outgoing) -> Properties | None:
    if not message.expires_s:
        return None
    properties = Properties(packet)  # type: ignore[no-untyped-call]
    properties.MessageExpiryInterval = message.expires_s
    return properties


def _tls_context(identity: Identity) -> ssl.SSLContext:
    """Trusts the job's authority alone, checks the broker's name, and shows our certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=identity.ca_pem.decode())
    # OpenSSL takes a certificate and its key from a file only.
    with tempfile.TemporaryDirectory(prefix="starlings-") as directory:
        pair = Path(directory) / "pair.pem"
        write_private(pair, identity.key_pem + identity.certificate_pem)
        context.load_cert_chain(pair)
    return context


def _in_words(error: Exception) -> str:
    match error:
        case aiomqtt.MqttError() if str(error) == "Operation timed out":
            return f"no answer within {ANSWER_WITHIN_S:.0f} s"
        case aiomqtt.MqttError() if isinstance(error.__cause__, Exception):
            return _in_words(error.__cause__)
        case aiomqtt.exceptions.MqttCodeError():
            return str(error).partition("] ")[2].lower() or str(error)
        case _:
            return str(error) or type(error).__name__
