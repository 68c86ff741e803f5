#!/bin/sh
# frugal                     run the pipeline: what has changed, and on from where it was stopped
# frugal repro [ARGUMENTS]   the same, with arguments of `dvc repro`
# frugal COMMAND [ARGUMENTS] any other command (dvc metrics show, bash, …) in the folder of the pipeline
#
# The image's entrypoint; where something else is, type it. It makes the folder of the pipeline ready first:
# $FRUGAL_CHECKOUT, /workspace/frugal by default. A checkout of yours that is mounted there is used as it is.
# An empty folder is filled with the code of this image, as a git repository; a later image replaces it.
#
# Exit status: that of the command (75: stopped and saved, run it again); 1 where the folder cannot be used.
set -eu

# Shells of sshd's begin without the image's environment.
# shellcheck source=/dev/null
if [ -z "${FRUGAL_SOURCE:-}" ] && [ -r /etc/profile.d/frugal.sh ]; then . /etc/profile.d/frugal.sh; fi
export HOME="${HOME:-/home/frugal}"
checkout=${FRUGAL_CHECKOUT:-/workspace/frugal}
source=${FRUGAL_SOURCE:-/opt/frugal/source}
revision=${FRUGAL_GIT_COMMIT:-unknown}
me=$(id -u):$(id -g)
# Where the folder is being filled; it disappears when all is there.
unfinished=.frugal-unfinished

fail() {
  echo "frugal: $*" >&2
  exit 1
}

main() {
  case ${1:-} in -h | --help)
    sed -n '2,4s/^# //p' "$0"
    exit 0
    ;;
  esac
  [ -f "$source/dvc.yaml" ] ||
    fail "FRUGAL_SOURCE is $source, where the image should keep its code, and there is none; unset it"
  prepare
  choose_home
  if [ $# = 0 ]; then set -- repro; fi
  if [ "$1" = repro ]; then
    shift
    exec python -m stages.repro "$@"
  fi
  if [ "$1" = dvc ]; then
    # Containers that share the checkout leave DVC's locks alone while it runs.
    mkdir -p .work
    exec 8>>.work/repro.lock
    flock --shared 8 || true
  fi
  exec "$@"
}

prepare() {
  mkdir -p "$checkout" 2>/dev/null ||
    fail "$checkout is not there and $me may not make it; mount a volume or a clone of the project there"
  [ -d "$checkout" ] || fail "$checkout is no folder; mount a checkout or an empty volume there"
  check_writable "$checkout"
  cd "$checkout"
  if [ -f dvc.yaml ] && [ ! -e "$unfinished" ] && [ ! -f .git/frugal-image ]; then
    check_own_checkout
    return
  fi
  # One container at a time makes or changes the code; file systems without locks go without.
  exec 9<.
  flock 9 || true
  if [ -e "$unfinished" ] || [ ! -f dvc.yaml ]; then fill; fi
  check_parts_writable
  if [ "$(image_of_checkout)" != "$(id_of_source)" ]; then replace_code; fi
  exec 9<&-
}

# --- a checkout of the user's -----------------------------------------------------------------------------

check_own_checkout() {
  check_parts_writable
  git rev-parse --git-dir >/dev/null 2>&1 ||
    fail "$checkout is no git repository, which DVC needs (that of a worktree or submodule lies elsewhere);" \
      "mount a clone of the project, or make it one: git init"
}

check_writable() {
  [ ! -w "$1" ] || return 0
  owner=$(stat -c %u:%g "$1")
  if [ "$owner" = "$me" ] || [ "$(id -u)" = 0 ]; then
    fail "$1 is mounted read-only or its mode keeps its owner from writing; results are written there"
  fi
  fail "$1 belongs to $owner, and $me may not write there; start the container with --user $owner" \
    "(docker compose: FRUGAL_UID=${owner%:*} FRUGAL_GID=${owner#*:}), or change the owner: chown -R $me"
}

# Earlier runs under another user leave folders that are only theirs.
check_parts_writable() {
  for part in .git .dvc .dvc/tmp .dvc/cache .dvc/cache/files .work data models results hugging_face; do
    if [ -e "$part" ]; then check_writable "$checkout/$part"; fi
  done
}

# --- a folder with the image's code -----------------------------------------------------------------------

fill() {
  if [ ! -e "$unfinished" ]; then
    # What a formatted disk has in it from the start.
    strange=$(find . -mindepth 1 -maxdepth 1 ! -name lost+found | head -n 1)
    [ -z "$strange" ] ||
      fail "$checkout is not empty (${strange#./}) and has no dvc.yaml; mount a clone of the project or an" \
        "empty folder there, or set FRUGAL_CHECKOUT to another folder"
    : >"$unfinished"
  fi
  cp -R "$source/." .
  rm -rf .git
  git init --quiet --initial-branch=main
  echo "/$unfinished" >>.git/info/exclude
  git add --all
  commit "Frugal, image of commit $revision"
  record_image
  rm "$unfinished"
  echo "frugal: $checkout was empty and has the code of this image now, commit $revision" >&2
}

# The code of another image made way for this one's, unless the user has edited it.
replace_code() {
  if [ -e .work/repro.lock ]; then
    flock --exclusive --nonblock .work/repro.lock true ||
      fail "$checkout has the code of another image, and a container of that image runs the pipeline in it;" \
        "wait for it or stop it"
  fi
  rm -f .git/index.lock  # of a container that was killed here
  made=$(sed -n 2p .git/frugal-image)
  old=$(git ls-tree -r --name-only "$made" | grep -vxE "$kept" | sort)
  new=$(cd "$source" && find . -type f | sed 's|^\./||' | grep -vxE "$kept" | sort)
  list=$(mktemp)
  printf '%s\n' "$old" "$new" | sort -u >"$list"
  edited=$(while IFS= read -r path; do if is_edited "$path"; then echo "$path"; fi; done <"$list")
  if [ -n "$edited" ]; then
    rm "$list"
    fail "$checkout has the code of another image with edits of yours, which this image would overwrite:" \
      "$(echo "$edited" | head -n 3 | xargs); use the image of commit $(sed -n 3p .git/frugal-image)," \
      "take the edits back (git checkout $made -- FILE), or set FRUGAL_CHECKOUT to another folder"
  fi
  while IFS= read -r path; do
    if [ -f "$source/$path" ]; then
      mkdir -p "$(dirname "$path")"
      cp "$source/$path" "$path"
    else
      rm -f "$path"
    fi
  done <"$list"
  # Those of files that are nowhere any more are no concern of git's.
  git ls-files >"$list.known"
  { cat "$list.known"; echo "$new"; } | sort -u | comm -12 - "$list" >"$list.changed"
  git add --all --pathspec-from-file="$list.changed"
  git diff --cached --quiet --exit-code ||
    commit "Frugal, image of commit $revision" --only --pathspec-from-file="$list.changed"
  rm "$list" "$list.known" "$list.changed"
  record_image
  echo "frugal: $checkout had the code of another image and has this one's now, commit $revision;" \
    "params.yaml and dvc.lock are as they were" >&2
}

# What a user edits and what the pipeline writes.
kept='params\.yaml|dvc\.lock'

# Neither what the old image brought nor what this one brings. (The latter: this was begun and killed.)
is_edited() {
  [ -e "$1" ] || return 1
  if [ -f "$source/$1" ] && cmp -s "$source/$1" "$1"; then return 1; fi
  if git cat-file blob "$made:$1" 2>/dev/null | cmp -s - "$1"; then return 1; fi
}

commit() {
  message=$1
  shift
  git -c user.name=Frugal -c user.email=frugal@localhost commit --quiet --message "$message" "$@"
}

record_image() {
  { id_of_source; git rev-parse HEAD; echo "$revision"; } >.git/frugal-image.new
  mv .git/frugal-image.new .git/frugal-image
}

image_of_checkout() { head -n 1 .git/frugal-image; }

id_of_source() { (cd "$source" && find . -type f | sort | xargs sha256sum | sha256sum | cut -d ' ' -f 1); }

# --- caches beside the checkout ---------------------------------------------------------------------------

# A home on a volume may belong to another user from an earlier run: this user gets a corner of it, or a
# temporary one.
choose_home() {
  for folder in "$HOME" "$HOME/.cache" "$HOME/.config"; do
    if [ -e "$folder" ] && [ ! -w "$folder" ]; then
      HOME=$HOME/uid-$(id -u)
      mkdir -p "$HOME" 2>/dev/null || HOME=$(mktemp -d)
      export HOME
      break
    fi
  done
  # With it DVC need not hash again what an earlier container has hashed.
  export DVC_SITE_CACHE_DIR="${DVC_SITE_CACHE_DIR:-$HOME/.cache/dvc}"
}

main "$@"
