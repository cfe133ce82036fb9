#!/usr/bin/env bash
# Install, then train a draft head for the embedded target and measure it: at most 15 minutes on two cores.
# Arguments go to `specheads quickstart` (--head medusa, --minutes 10, --target MODEL, --output FOLDER, --fresh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh
install_specheads ""
cd "$OLDPWD" # folders among the arguments are the caller's
exec "$python" -m specheads quickstart "$@"
