"""Every error that megatron_kd raises, as one tree.

    KDError
    ├── ConfigError (ValueError)            the user's request cannot be right
    │   ├── UnsupportedLayout               Megatron, or this plugin, cannot do this layout correctly
    │   ├── VocabMismatch                   vocabulary sizes, shards or labels do not fit
    │   └── TokenizerMismatch               student and teacher map ids to other tokens
    ├── MissingDependency (ImportError)     an optional package is absent; the message holds the pip command
    ├── DataError
    │   ├── DataEnded                       the student's data iterator ended early
    │   └── RowsMismatch                    rows, row ids or token hash are not those asked for
    ├── TeacherError (RuntimeError)         names the replica
    │   ├── TeacherStalled                  a deadline passed while waiting for rows
    │   ├── TeacherLost                     a replica died or left
    │   └── NonFiniteTeacher                NaN or infinity in teacher rows
    ├── WireError (RuntimeError)
    │   ├── WireVersionMismatch
    │   ├── FingerprintMismatch             another teacher, head transform, width or dtype
    │   ├── AuthenticationFailed
    │   └── TransferFailed
    ├── CacheError (RuntimeError)
    │   ├── CacheMiss
    │   └── CacheCorrupt
    ├── GradientContractError (RuntimeError)  backward brought something that the fused loss was not told
    ├── PlanError (ValueError)
    └── ConvertError (RuntimeError)

Called by every package; imports nothing. A message states the name, the value got, the rule and the way out:
`rule()` below builds one.
"""


class KDError(Exception):
    """Base of all errors of this package."""


class ConfigError(KDError, ValueError):
    """A setting, an argument or a combination of them that cannot be right."""


class UnsupportedLayout(ConfigError):
    """A parallel layout in which Megatron or this plugin would be wrong; refused before the first step."""


class VocabMismatch(ConfigError):
    """Vocabulary sizes, shards or labels that do not fit each other."""


class TokenizerMismatch(ConfigError):
    """Student and teacher tokenizers differ; the message names the ids."""


class MissingDependency(KDError, ImportError):
    """An optional package is not installed; the message holds the pip command."""


class DataError(KDError, RuntimeError):
    """The student's data is not what was announced."""


class DataEnded(DataError):
    """The data iterator ended before the training plan did."""


class RowsMismatch(DataError):
    """The rows, row ids or token hash of an answer are not those asked for."""


class TeacherError(KDError, RuntimeError):
    """A teacher failed; the message names the replica."""


class TeacherStalled(TeacherError):
    """A deadline passed while the student waited for teacher rows."""


class TeacherLost(TeacherError):
    """A teacher replica died, left, or was cut off."""


class NonFiniteTeacher(TeacherError):
    """NaN or infinity in teacher rows."""


class WireError(KDError, RuntimeError):
    """The stream between teacher and student broke its protocol."""


class WireVersionMismatch(WireError):
    """The two sides speak different versions of the wire."""


class FingerprintMismatch(WireError):
    """Another teacher, head transform, width or dtype than the handshake agreed on."""


class AuthenticationFailed(WireError):
    """A connection without the shared token."""


class TransferFailed(WireError):
    """A one-sided write did not complete."""


class CacheError(KDError, RuntimeError):
    """The offline cache cannot serve."""


class CacheMiss(CacheError):
    """A segment or row that the cache does not hold."""


class CacheCorrupt(CacheError):
    """Stored bytes that fail their checksum or structure."""


class GradientContractError(KDError, RuntimeError):
    """The upstream gradient is not (one constant) x (the weights given in forward)."""


class PlanError(KDError, ValueError):
    """The planner cannot plan this: unknown model, impossible layout."""


class ConvertError(KDError, RuntimeError):
    """A checkpoint could not be converted; the target was left untouched."""


def rule(name: str, got: object, rule: str, way_out: str) -> str:
    """One error message: `name = got: rule. way_out.`"""
    return f"{name} = {got!r}: {rule.rstrip('.')}. {way_out.rstrip('.')}."
