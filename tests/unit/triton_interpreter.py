"""Triton's interpreter for the kernel tests. Import it only in a process that was started with TRITON_INTERPRET=1."""

import triton.runtime.interpreter as interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch(tensor, scope):
    """Triton 3.6 makes loop bounds with int(array of one element), which NumPy 2.5 refuses."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch
