from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerificationPolicy(_message.Message):
    __slots__ = ("off", "fixed")
    class Off(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Fixed(_message.Message):
        __slots__ = ("gamma",)
        GAMMA_FIELD_NUMBER: _ClassVar[int]
        gamma: int
        def __init__(self, gamma: _Optional[int] = ...) -> None: ...
    OFF_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    off: VerificationPolicy.Off
    fixed: VerificationPolicy.Fixed
    def __init__(self, off: _Optional[_Union[VerificationPolicy.Off, _Mapping]] = ..., fixed: _Optional[_Union[VerificationPolicy.Fixed, _Mapping]] = ...) -> None: ...

class GetVerificationPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetVerificationPolicyRequest(_message.Message):
    __slots__ = ("policy", "expected_revision")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REVISION_FIELD_NUMBER: _ClassVar[int]
    policy: VerificationPolicy
    expected_revision: int
    def __init__(self, policy: _Optional[_Union[VerificationPolicy, _Mapping]] = ..., expected_revision: _Optional[int] = ...) -> None: ...

class VerificationPolicyState(_message.Message):
    __slots__ = ("policy", "revision", "effective_step")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_STEP_FIELD_NUMBER: _ClassVar[int]
    policy: VerificationPolicy
    revision: int
    effective_step: int
    def __init__(self, policy: _Optional[_Union[VerificationPolicy, _Mapping]] = ..., revision: _Optional[int] = ..., effective_step: _Optional[int] = ...) -> None: ...
