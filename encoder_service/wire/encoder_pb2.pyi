from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Item(_message.Message):
    __slots__ = ("type", "data", "url", "frames", "min_pixels", "max_pixels", "max_patches", "fps", "num_frames")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PATCHES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    type: str
    data: bytes
    url: str
    frames: Frames
    min_pixels: int
    max_pixels: int
    max_patches: int
    fps: float
    num_frames: int
    def __init__(self, type: _Optional[str] = ..., data: _Optional[bytes] = ..., url: _Optional[str] = ..., frames: _Optional[_Union[Frames, _Mapping]] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., max_patches: _Optional[int] = ..., fps: _Optional[float] = ..., num_frames: _Optional[int] = ...) -> None: ...

class Frames(_message.Message):
    __slots__ = ("data", "fps")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    data: _containers.RepeatedScalarFieldContainer[bytes]
    fps: float
    def __init__(self, data: _Optional[_Iterable[bytes]] = ..., fps: _Optional[float] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("dtype", "timeout_s", "on_error", "reference", "evs_rate", "min_pixels", "max_pixels", "max_patches", "fps", "num_frames")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    ON_ERROR_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    EVS_RATE_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_PATCHES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    timeout_s: float
    on_error: str
    reference: bool
    evs_rate: float
    min_pixels: int
    max_pixels: int
    max_patches: int
    fps: float
    num_frames: int
    def __init__(self, dtype: _Optional[str] = ..., timeout_s: _Optional[float] = ..., on_error: _Optional[str] = ..., reference: _Optional[bool] = ..., evs_rate: _Optional[float] = ..., min_pixels: _Optional[int] = ..., max_pixels: _Optional[int] = ..., max_patches: _Optional[int] = ..., fps: _Optional[float] = ..., num_frames: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("reference",)
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    reference: str
    def __init__(self, reference: _Optional[str] = ...) -> None: ...

class GetPlaceRequest(_message.Message):
    __slots__ = ("reference",)
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    reference: str
    def __init__(self, reference: _Optional[str] = ...) -> None: ...

class GetPlaceResponse(_message.Message):
    __slots__ = ("unix", "tcp", "version")
    UNIX_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    unix: str
    tcp: str
    version: int
    def __init__(self, unix: _Optional[str] = ..., tcp: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("reference",)
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    reference: str
    def __init__(self, reference: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("items", "options")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    options: Options
    def __init__(self, items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., options: _Optional[_Union[Options, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("type", "message", "item", "retryable")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    item: int
    retryable: bool
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., item: _Optional[int] = ..., retryable: _Optional[bool] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("index", "type", "grid_thw", "tokens", "dtype", "shape", "data", "digest", "source", "deepstack", "notice", "reference", "error", "timestamps", "second_per_grid_ts", "frame_tokens", "kept_rows", "scales")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    GRID_THW_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DEEPSTACK_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    SECOND_PER_GRID_TS_FIELD_NUMBER: _ClassVar[int]
    FRAME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    index: int
    type: str
    grid_thw: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    digest: str
    source: str
    deepstack: int
    notice: str
    reference: str
    error: Error
    timestamps: _containers.RepeatedScalarFieldContainer[float]
    second_per_grid_ts: float
    frame_tokens: _containers.RepeatedScalarFieldContainer[int]
    kept_rows: _containers.RepeatedScalarFieldContainer[int]
    scales: bytes
    def __init__(self, index: _Optional[int] = ..., type: _Optional[str] = ..., grid_thw: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., digest: _Optional[str] = ..., source: _Optional[str] = ..., deepstack: _Optional[int] = ..., notice: _Optional[str] = ..., reference: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., timestamps: _Optional[_Iterable[float]] = ..., second_per_grid_ts: _Optional[float] = ..., frame_tokens: _Optional[_Iterable[int]] = ..., kept_rows: _Optional[_Iterable[int]] = ..., scales: _Optional[bytes] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ms", "preprocess_ms", "encode_ms", "total_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_MS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    preprocess_ms: float
    encode_ms: float
    total_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., preprocess_ms: _Optional[float] = ..., encode_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("model", "weights", "items", "timings", "family")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    items: _containers.RepeatedCompositeFieldContainer[Embedding]
    timings: Timings
    family: str
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., items: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., family: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("index", "type", "width", "height", "grid_thw", "tokens", "patches", "digest", "notice", "error", "timestamps", "second_per_grid_ts", "seconds")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    GRID_THW_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    SECOND_PER_GRID_TS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    type: str
    width: int
    height: int
    grid_thw: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    patches: int
    digest: str
    notice: str
    error: Error
    timestamps: _containers.RepeatedScalarFieldContainer[float]
    second_per_grid_ts: float
    seconds: float
    def __init__(self, index: _Optional[int] = ..., type: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., grid_thw: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., patches: _Optional[int] = ..., digest: _Optional[str] = ..., notice: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., timestamps: _Optional[_Iterable[float]] = ..., second_per_grid_ts: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("model", "weights", "items", "family")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    items: _containers.RepeatedCompositeFieldContainer[Plan]
    family: str
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., items: _Optional[_Iterable[_Union[Plan, _Mapping]]] = ..., family: _Optional[str] = ...) -> None: ...

class EncodeChunk(_message.Message):
    __slots__ = ("model", "weights", "embedding", "last", "family", "timings")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: str
    embedding: Embedding
    last: bool
    family: str
    timings: Timings
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[str] = ..., embedding: _Optional[_Union[Embedding, _Mapping]] = ..., last: _Optional[bool] = ..., family: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
