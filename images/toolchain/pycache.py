"""Compiles the Python sources of TARGET/usr/lib for where an image has them,
below OUT, with files no newer than EPOCH. The interpreter is the worker's own;
bytecode depends on the version of Python alone, not on the architecture.

usage: pycache.py TARGET OUT EPOCH
"""

import importlib.util
import os
import py_compile
import sys

target, out, epoch = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.umask(0o022)

# One process, in one order: what is interned when a file is compiled is in
# its bytecode.
for folder, folders, names in os.walk(os.path.join(target, "usr/lib")):
    folders.sort()
    for name in sorted(names):
        if not name.endswith(".py"):
            continue
        source = os.path.join(folder, name)
        at = "/" + os.path.relpath(source, target)
        compiled = out + importlib.util.cache_from_source(at)
        os.makedirs(os.path.dirname(compiled), exist_ok=True)
        # Holds the source's time and size: a source that is replaced is not
        # taken for the one compiled here.
        py_compile.compile(source, compiled, at, doraise=True,
                           invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)

for folder, folders, names in os.walk(out, topdown=False):
    for name in names:
        os.utime(os.path.join(folder, name), (epoch, epoch))
    os.utime(folder, (epoch, epoch))
