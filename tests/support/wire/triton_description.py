"""The description of Triton's protobuf files in the installed tritonclient; run, it writes that of Weir anew."""

from __future__ import annotations

from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from weir.schemas.kserve.triton_messages import DESCRIPTION


def installed_description() -> bytes:
    """A serialized `FileDescriptorSet` of both files, each after what it imports."""
    found = descriptor_pb2.FileDescriptorSet()
    for module in (model_config_pb2, service_pb2):
        module.DESCRIPTOR.CopyToProto(found.file.add())
    return found.SerializeToString(deterministic=True)


if __name__ == "__main__":
    DESCRIPTION.write_bytes(installed_description())
