#!/bin/busybox sh
# First process of a machine: the host's root, read-only by 9p, under a writable layer in memory.
PATH=/bin:/usr/sbin:/usr/bin:/sbin
if [ "$1" != booted ]; then
    /bin/busybox mkdir -p /proc /sys /dev /lower /upper /root
    /bin/busybox --install -s /bin
    mount -t proc proc /proc
    while read -r module; do insmod "/modules/$module" || echo "lab: no $module"; done < /modules/order
    mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 root /lower
    mount -t tmpfs tmpfs /upper
    mkdir /upper/files /upper/work
    mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
    cp /init /root/run-init
    exec switch_root /root /bin/sh /run-init booted
fi
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
for folder in /run /dev/shm; do mount -t tmpfs tmpfs $folder; done
mkdir -p /run/lock /lib/modules
ln -sfn "$LAB_KERNEL/lib/modules/$(uname -r)" "/lib/modules/$(uname -r)"
echo "$LAB_NAME" > /proc/sys/kernel/hostname
echo "$LAB_HOSTS" | tr ',' '\n' | tr '=' ' ' > /etc/hosts
sed -i 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf
ip link set lo up
ip address add "$LAB_ADDRESS/24" dev eth0
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth1
ip link set eth1 up
# shellcheck disable=SC2046  # its words are arguments
/usr/bin/python3 -I -S $(echo "$LAB_REMOTE" | tr ':' ' ') < /dev/null > /dev/ttyS0 2>&1 &
echo "lab: ready" > /dev/ttyS0
while :; do sleep 1000 & wait; done
