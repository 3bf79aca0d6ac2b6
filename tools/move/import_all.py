import importlib,sys,traceback
from pathlib import Path
bad=0
for p in sorted([*Path("verl_memopt").rglob("*.py"),*Path("tools").rglob("*.py")]):
    n=".".join(p.with_suffix("").parts).removesuffix(".__init__")
    if n.endswith("__main__"): continue
    try: importlib.import_module(n)
    except BaseException: bad+=1; print("FAIL",n); traceback.print_exc(limit=-2)
print("failed:",bad)
