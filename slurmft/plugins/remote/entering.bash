# Enters the folder into which --on sends code; see core/ownership.bash, whose functions come first.

# Succeeds where others can rename in a folder, or have made it.
slurmft_others_rename_in() { # FOLDER
  local mode;
  local owner;
  read -r mode owner < <(stat -c '%a %u' -- "$1") || return 0;
  slurmft_mount_is_trusted "$1" || return 0;
  if ((8#$mode & 8#22)) && ((!(8#$mode & 8#1000))); then return 0; fi;
  ((owner)) && ((owner != EUID));
};

# Fails for a link that core/descent.py would not follow. Sets is_led where it is another user's.
slurmft_may_follow() { # FOLDER LINK
  local holder;
  local mode;
  local user;
  user=$(stat -c %u -- "$2") || return;
  if ((!user)) || ((user == EUID)); then return; fi;
  is_led=1;
  read -r mode holder < <(stat -c '%a %u' -- "$1") || return;
  ((user == holder)) && ((!(8#$mode & 8#22)));
};

# Follows a path, and makes the folders of it that are absent. Sets way, a path to the same folder
# without links, and is_led where others can lead the path elsewhere, now or later: all that hold a
# part of it count, also those from which a link leads away.
slurmft_follow() { # PATH
  local links=0;
  local part;
  local rest=$1;
  local target;
  if [[ $rest != /* ]]; then
    cd -P . || return;
    rest=$PWD/$rest;
  fi;
  way=;
  is_led=;
  while [ "$rest" ]; do
    part=${rest%%/*};
    rest=${rest#"$part"};
    rest=${rest#/};
    case $part in
      '' | .) continue;;
      ..)
        way=${way%/*};
        continue;;
    esac;
    if slurmft_others_rename_in "$way/"; then is_led=1; fi;
    if [ -L "$way/$part" ]; then
      slurmft_may_follow "$way/" "$way/$part" || return;
      ((++links <= 40)) || return;
      target=$(readlink -n -- "$way/$part" && echo .) || return; # $() drops line ends
      target=${target%.};
      if [[ $target = /* ]]; then way=; fi;
      rest=$target/$rest;
      continue;
    fi;
    # Another command may make it, too.
    [ -d "$way/$part" ] || mkdir -- "$way/$part" 2>/dev/null || [ -d "$way/$part" ] || return;
    way+=/$part;
  done;
};

slurmft_is_closed() {
  ((!(8#$(stat -c %a .) & 8#77)));
};

slurmft_is_marked() { # MARK
  [ "$(stat -c %i .)" = "$(cat "$1" 2>/dev/null)" ];
};

# Succeeds where there is nothing but what file servers show in each folder.
slurmft_is_empty() {
  [ -z "$(ls -A -I .snapshot -I .snapshots -I .zfs)" ];
};

# These ask of the present folder: what has its name by now does not count.
slurmft_is_own() { # MARK IS_NEW IS_LED
  [ -O . ] || return;
  slurmft_mount_is_trusted . || return;
  # What lies in a closed folder nobody else can write, whatever lists it takes over.
  if [ "$2" ]; then
    slurmft_is_closed && slurmft_is_empty;
  elif [ "$3" ]; then
    slurmft_is_closed && slurmft_is_marked "$1";
  else
    chmod go-rwx .;
  fi;
};

# Enters a folder, and makes it where it is absent; fails where slurmft may not have made it for
# this user alone.
slurmft_enter() { # FOLDER MARK
  local folder;
  local is_led;
  local is_new=;
  local way;
  slurmft_follow "${1%/*}/" || return;
  folder=$way/${1##*/};
  if mkdir -m 700 -- "$folder" 2>/dev/null; then is_new=1; fi;
  if [ -L "$folder" ]; then return 1; fi;
  CDPATH='' cd -P -- "$folder" 2>/dev/null || return;
  # Where others can give its name to another folder of this user's, they may have filled that one.
  if slurmft_others_rename_in "$way/"; then is_led=1; fi;
  if [[ ! $folder -ef . ]]; then is_led=1; fi;
  slurmft_is_own "$2" "$is_new" "$is_led" || return;
  if [ "$is_new" ] && [ "$is_led" ]; then
    stat -c %i . >"$2";
  fi;
};
