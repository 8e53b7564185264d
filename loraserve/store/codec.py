"""Documents as JSON: the same bytes on disk and in Redis."""

import msgspec

from loraserve.store.records import AdapterDoc, AnyDocument, Document, DocumentKind, KeyDoc, TenantDoc


class DocumentCodec:
    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder(order="deterministic")
        self._decoders: dict[DocumentKind, msgspec.json.Decoder[AnyDocument]] = {
            DocumentKind.TENANT: msgspec.json.Decoder(Document[TenantDoc]),
            DocumentKind.KEY: msgspec.json.Decoder(Document[KeyDoc]),
            DocumentKind.ADAPTER: msgspec.json.Decoder(Document[AdapterDoc]),
        }

    def encode(self, document: AnyDocument) -> bytes:
        return self._encoder.encode(document)

    def decode(self, kind: DocumentKind, body: bytes) -> AnyDocument:
        """Raises `msgspec.DecodeError` (or its `ValidationError`), also if the document is of another kind."""
        document = self._decoders[kind].decode(body)
        if document.kind != kind:
            raise msgspec.ValidationError(f"a document of kind {document.kind}, expected {kind}")
        return document
