"""The plain loop: one token a forward, over the same target forward and the same cache as the speculative decoder."""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.decoding.decoder import Decoder, Session, finite_choice, refuse_not_a_number
from specheads.sampling import pick
from specheads.target.adapter import Target


class PlainDecoder(Decoder):
    """Decoding without a draft; ``generate`` and ``stream`` as in ``SpeculativeDecoder``. What a draft has to beat."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)

    @torch.inference_mode()
    def _step(self, session: Session, root: Tensor) -> Tensor:
        """Feed the last token of every row (B), emit the next. Ended rows are fed along and keep nothing."""
        rows, cache = session.rows, session.cache
        out = self.target.forward(root[:, None], cache=cache)
        assert out.logits is not None
        session.count.lap("target")
        following = pick(out.logits[:, 0], session.sampling, session.generator)
        kept = [0] * len(rows.prompts)
        facts = torch.stack([finite_choice(out.logits[:, 0], following), following], dim=1)
        for row, (number, token) in enumerate(facts.tolist()):
            if rows.finish[row] is None:
                refuse_not_a_number(number)
                kept[row] = rows.take(row, [token])
                session.count.step(row, drafted=0, accepted=0, emitted=1, nodes=1)
        cache.commit(torch.zeros_like(root)[:, None], torch.tensor(kept, device=root.device), max(kept))
        session.count.lap("verify")
        return following
