"""`LargeLoad`: clients whose tensors are large in both directions, so that hosts fetch them from each other."""

from __future__ import annotations

import json

from tests.faults.loads.http_caller import Answer, HttpCaller
from tests.faults.loads.live import LiveLoad
from tests.support.durable.ledger import answer_to

LARGE = "large"
"""The model, which returns its input."""

_LARGE_BYTES = 3_000_000


class LargeLoad(LiveLoad):
    """A response counts as right if its tensor is the one that was sent."""

    async def _ask(self, caller: HttpCaller, number: int, payload: bytes) -> Answer:
        content = (payload * (_LARGE_BYTES // len(payload)))[: _LARGE_BYTES // 4 * 4 - len(payload) // 4 * 4]
        tensor = {"name": "IN", "shape": [1, len(content) // 4], "datatype": "FP32"}
        wanted = {"name": "OUT", "parameters": {"binary_data": True}}
        tensor["parameters"] = {"binary_data_size": len(content)}
        header = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(header)), "X-Request-Id": str(number)}
        answer = await caller.ask(f"/v2/models/{LARGE}/infer", header + content, headers)
        if answer.status != 200:
            return answer
        output = answer.body[int(answer.headers["inference-header-content-length"]) :]
        return answer._replace(body=answer_to(payload if output == content else b"").encode())
