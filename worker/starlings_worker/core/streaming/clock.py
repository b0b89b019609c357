"""What a worker knows of the whole swarm, and goes on with while the coordinator is away."""

from __future__ import annotations

from starlings_protos.stream_messages import SwarmProgress


class SwarmClock:
    """Tokens are the clock of an `async` job: never a worker's own steps, of which fast ones take more."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._tokens_per_s = 0.0
        self._heard_at_s = 0.0
        # Trained by this worker since.
        self._own_tokens = 0
        # Running mean over the whole model; 0 while it is unknown.
        self.gradient_norm = 0.0

    def start(self, tokens: float, now_s: float) -> None:
        """A span was loaded, and nothing was heard yet."""
        if not self._heard_at_s:
            self._tokens, self._heard_at_s = tokens, now_s

    def heard(self, message: SwarmProgress, now_s: float) -> None:
        self._tokens, self._tokens_per_s = float(message.tokens), message.tokens_per_s
        self.gradient_norm = message.gradient_norm
        self._heard_at_s, self._own_tokens = now_s, 0

    def trained(self, tokens: int) -> None:
        """A microbatch that this worker leads is done."""
        self._own_tokens += tokens

    def tokens(self, now_s: float) -> float:
        extrapolated = self._tokens_per_s * max(0.0, now_s - self._heard_at_s)
        return self._tokens + max(extrapolated, float(self._own_tokens))
