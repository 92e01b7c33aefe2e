"""`Payload`: one inference request as bytes, the same for the check of the responses and for the measurement."""

from __future__ import annotations

import http.client
from dataclasses import dataclass

import grpc
import numpy as np
from tritonclient import http as triton_http
from tritonclient.grpc import service_pb2

from benchmarks.compare.networks import Network
from benchmarks.compare.targets import Protocol

GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Payload:
    """What a client sends: a path, headers and a body; for gRPC the method and the serialised message."""

    protocol: Protocol
    path: str
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, protocol: Protocol, network: Network, x: np.ndarray) -> Payload:
        """The request of `network` for input `x`, with binary tensors both ways."""
        if protocol is Protocol.GRPC:
            message = service_pb2.ModelInferRequest(model_name=network.name, raw_input_contents=[x.tobytes()])
            message.inputs.add(name="X", datatype=network.datatype, shape=x.shape)
            message.outputs.add(name="Y")
            return cls(protocol, GRPC_METHOD, {}, message.SerializeToString())
        tensor = triton_http.InferInput("X", list(x.shape), network.datatype)
        tensor.set_data_from_numpy(x)
        body, header_length = triton_http.InferenceServerClient.generate_request_body(
            [tensor], outputs=[triton_http.InferRequestedOutput("Y")]
        )
        headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(header_length)}
        return cls(protocol, f"/v2/models/{network.name}/infer", headers, body)

    def ask(self, address: str) -> np.ndarray:
        """The server's answer. Raises what the client raises when there is none."""
        return self._ask_grpc(address) if self.protocol is Protocol.GRPC else self._ask_http(address)

    def _ask_grpc(self, address: str) -> np.ndarray:
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.unary_unary(self.path, response_deserializer=service_pb2.ModelInferResponse.FromString)
            response = call(self.body, timeout=_TIMEOUT_S)
        return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)

    def _ask_http(self, address: str) -> np.ndarray:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", self.path, self.body, self.headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise ConnectionError(f"HTTP {response.status}: {body[:200].decode(errors='replace')}")
            length = response.getheader("Inference-Header-Content-Length")
            result = triton_http.InferenceServerClient.parse_response_body(body, header_length=int(length or 0) or None)
            return result.as_numpy("Y")
        finally:
            connection.close()
