// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A machine built of files for what this one has not; real loop devices for the rest.

use super::*;
use crate::host::loop_device::{LoopDevice, LoopOptions};
use forebay_testing::run;
use std::fs;
use std::os::unix::fs::symlink;

/// `/proc` and `/sys` of a machine that exists only here.
struct Machine {
    root: PathBuf,
    host: Host,
}

impl Machine {
    fn new(name: &str) -> Self {
        let root =
            std::env::temp_dir().join(format!("forebay-guard-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let host = Host { proc: root.join("proc"), sys: root.join("sys") };
        for directory in ["proc/self", "sys/dev/block", "sys/class/block", "sys/block", "files"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::write(root.join("proc/self/mountinfo"), "").unwrap();
        fs::write(root.join("proc/swaps"), "Filename Type Size Used Priority\n").unwrap();
        Self { root, host }
    }

    fn device(&self, name: &str, number: &str) -> &Self {
        let directory = self.root.join("sys/devices").join(name);
        symlink(&directory, self.root.join("sys/block").join(name)).unwrap();
        self.add(&directory, name, number)
    }

    fn partition(&self, disk: &str, name: &str, number: &str) -> &Self {
        let directory = self.root.join("sys/devices").join(disk).join(name);
        self.add(&directory, name, number);
        fs::write(directory.join("partition"), "1\n").unwrap();
        self
    }

    fn add(&self, directory: &Path, name: &str, number: &str) -> &Self {
        for part in ["holders", "slaves", "loop", "dm", "md"] {
            fs::create_dir_all(directory.join(part)).unwrap();
        }
        fs::write(directory.join("dev"), format!("{number}\n")).unwrap();
        symlink(directory, self.root.join("sys/dev/block").join(number)).unwrap();
        symlink(directory, self.root.join("sys/class/block").join(name)).unwrap();
        self
    }

    fn set(&self, name: &str, attribute: &str, value: &str) -> &Self {
        fs::write(self.root.join("sys/class/block").join(name).join(attribute), value).unwrap();
        self
    }

    /// `upper` is made of `lower`.
    fn stack(&self, upper: &str, lower: &str) -> &Self {
        let class = self.root.join("sys/class/block");
        let upper_at = fs::canonicalize(class.join(upper)).unwrap();
        let lower_at = fs::canonicalize(class.join(lower)).unwrap();
        symlink(&lower_at, upper_at.join("slaves").join(lower)).unwrap();
        symlink(&upper_at, lower_at.join("holders").join(upper)).unwrap();
        self
    }

    fn mount(&self, number: &str, mount_point: &str, kind: &str, source: &str) -> &Self {
        let path = self.root.join("proc/self/mountinfo");
        let old = fs::read_to_string(&path).unwrap();
        let line = format!("1 0 {number} / {mount_point} rw shared:1 - {kind} {source} rw\n");
        fs::write(path, old + &line).unwrap();
        self
    }

    fn check(&self, number: &str) -> Result<(), GuardError> {
        self.host.check_free(&block(number))
    }

    fn file(&self, name: &str) -> Target {
        let path = self.root.join("files").join(name);
        fs::write(&path, "").unwrap();
        Target::of(&path).unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn block(number: &str) -> Target {
    let path = PathBuf::from(format!("/test/{number}"));
    Target::Block { path, number: DeviceNumber::parse(number).unwrap() }
}

fn disk(name: &str) -> Machine {
    let machine = Machine::new(name);
    machine
        .device("sdx", "8:240")
        .partition("sdx", "sdx1", "8:241")
        .partition("sdx", "sdx2", "8:242");
    machine
}

#[test]
fn idle_disk_and_partition_are_free() {
    let machine = disk("idle");
    machine.check("8:240").unwrap();
    machine.check("8:241").unwrap();
    assert!(matches!(machine.check("8:250"), Err(GuardError::Unknown { .. })));
}

#[test]
fn mounted_partition_refuses_itself_and_its_disk_but_not_its_neighbour() {
    let machine = disk("mounted");
    machine.mount("8:241", "/mnt/my\\040disk", "ext4", "/dev/sdx1");
    for number in ["8:240", "8:241"] {
        let error = machine.check(number).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("/dev/sdx1 is mounted at /mnt/my disk (ext4)"), "{text}");
    }
    machine.check("8:242").unwrap();
}

#[test]
fn mounted_whole_disk_refuses_its_partitions() {
    let machine = disk("whole");
    machine.mount("8:240", "/mnt", "xfs", "/dev/sdx");
    assert!(matches!(machine.check("8:242"), Err(GuardError::Mounted { .. })));
}

#[test]
fn every_device_of_a_mounted_btrfs_is_refused() {
    let machine = disk("btrfs");
    machine.device("sdy", "65:0").device("sdz", "65:16");
    machine.mount("0:44", "/data", "btrfs", "/dev/sdx1");
    let members = machine.root.join("sys/fs/btrfs/some-id/devices");
    fs::create_dir_all(&members).unwrap();
    for name in ["sdx1", "sdy"] {
        let device = fs::canonicalize(machine.root.join("sys/class/block").join(name)).unwrap();
        symlink(device, members.join(name)).unwrap();
    }
    for number in ["8:241", "65:0"] {
        let error = machine.check(number).unwrap_err();
        assert!(
            matches!(&error, GuardError::Mounted { mount_point, .. } if mount_point == Path::new("/data")),
            "{error}"
        );
    }
    machine.check("65:16").unwrap();
    // Mounted where we cannot see it: the kernel still lists its devices.
    fs::write(machine.root.join("proc/self/mountinfo"), "").unwrap();
    assert!(matches!(machine.check("65:0"), Err(GuardError::BtrfsMember { .. })));
}

#[test]
fn swap_device_and_swap_file_are_refused() {
    let machine = disk("swap");
    let file = machine.file("swap");
    let line = format!("h\n/dev/sdx2 partition 1 0 -1\n{} file 1 0 -2\n", file.path().display());
    fs::write(machine.root.join("proc/swaps"), line).unwrap();
    let error = machine.check("8:240").unwrap_err();
    assert!(matches!(&error, GuardError::Swap { device, .. } if device == Path::new("/dev/sdx2")));
    assert!(matches!(machine.host.check_free(&file), Err(GuardError::Swap { .. })));
    machine.host.check_free(&machine.file("other")).unwrap();
}

#[test]
fn members_of_arrays_and_volumes_name_their_holder() {
    let machine = disk("held");
    machine.device("md0", "9:0").device("dm-3", "253:3").device("sdy", "65:0");
    machine.stack("md0", "sdx1").stack("dm-3", "sdy");
    machine.set("md0", "md/level", "raid1\n");
    machine.set("dm-3", "dm/name", "vg-home\n").set("dm-3", "dm/uuid", "LVM-abc\n");
    let text = machine.check("8:240").unwrap_err().to_string();
    assert!(text.contains("/dev/sdx1 is part of md array /dev/md0 (raid1)"), "{text}");
    let text = machine.check("65:0").unwrap_err().to_string();
    assert!(text.contains("LVM volume /dev/mapper/vg-home"), "{text}");
    machine.mount("253:3", "/home", "ext4", "/dev/mapper/vg-home");
    let text = machine.check("253:3").unwrap_err().to_string();
    assert!(text.contains("/dev/mapper/vg-home is mounted at /home"), "{text}");
    machine.check("9:0").unwrap();
}

#[test]
fn unreadable_tables_are_not_a_free_device() {
    let machine = disk("unreadable");
    fs::remove_file(machine.root.join("proc/self/mountinfo")).unwrap();
    assert!(matches!(machine.check("8:240"), Err(GuardError::Unreadable { .. })));
    let machine = disk("nosys");
    let file = machine.file("cache");
    fs::remove_dir_all(machine.root.join("sys/block")).unwrap();
    assert!(matches!(machine.host.check_free(&file), Err(GuardError::Unreadable { .. })));
}

#[test]
fn file_behind_a_loop_device_is_refused_with_its_mounts() {
    let machine = disk("loop");
    let file = machine.file("image");
    machine.device("loop3", "7:3").partition("loop3", "loop3p1", "259:0");
    machine.set("loop3", "loop/backing_file", &format!("{}\n", file.path().display()));
    machine.mount("259:0", "/mnt/image", "ext4", "/dev/loop3p1");
    // By another name of the same file.
    let other = machine.root.join("files/other");
    fs::hard_link(file.path(), &other).unwrap();
    let error = machine.host.check_free(&Target::of(&other).unwrap()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("is behind /dev/loop3 (mounted at /mnt/image); unmount"), "{text}");
}

/// Its process may not answer; and what is looked for is elsewhere.
#[test]
fn a_file_on_somebody_elses_fuse_file_system_is_not_looked_at() {
    let machine = disk("fuse");
    let file = machine.file("image");
    machine.device("loop3", "7:3");
    machine.set("loop3", "loop/backing_file", &format!("{}\n", file.path().display()));
    let files = machine.root.join("files");
    machine.mount("0:7777", &files.display().to_string(), "fuse.sshfs", "far:/");
    // By another name: only a look at the file would tell that it is the same.
    let other = machine.root.join("files/other");
    fs::hard_link(file.path(), &other).unwrap();
    machine.host.check_free(&Target::of(&other).unwrap()).unwrap();
    // What is looked for is there as well: then it answers.
    let Target::File { on, .. } = file else { panic!("a file") };
    machine.mount(&on.to_string(), &files.display().to_string(), "fuse.sshfs", "far:/");
    machine.host.check_free(&Target::of(&other).unwrap()).unwrap_err();
}

/// The kernel shows no holder and grants an exclusive open, so the loop device's own word is all.
#[test]
fn device_behind_a_loop_device_is_refused_with_its_disk_and_not_its_neighbour() {
    let machine = disk("loopdisk");
    machine.device("loop3", "7:3").set("loop3", "loop/backing_file", "/dev/sdx1\n");
    for number in ["8:240", "8:241"] {
        let text = machine.check(number).unwrap_err().to_string();
        assert!(text.contains("/dev/sdx1 is behind /dev/loop3; detach"), "{text}");
    }
    machine.check("8:242").unwrap();
    machine.set("loop3", "loop/backing_file", "/dev/sdx\n");
    machine.mount("7:3", "/mnt", "ext4", "/dev/loop3");
    let text = machine.check("8:242").unwrap_err().to_string();
    assert!(text.contains("/dev/sdx is behind /dev/loop3 (mounted at /mnt)"), "{text}");
}

#[test]
fn stacked_devices_are_related_and_neighbours_are_not() {
    let machine = disk("stack");
    machine.device("md0", "9:0").device("dm-0", "253:0").device("dm-1", "253:1");
    machine.stack("md0", "sdx1").stack("dm-0", "md0").stack("dm-1", "md0");
    let related = |a, b| machine.host.related(&block(a), &block(b)).unwrap();
    assert_eq!(related("8:240", "8:240"), Some(Relation::Same));
    for (upper, lower, through) in [
        ("8:241", "8:240", Link::PartitionOf),
        ("9:0", "8:241", Link::MadeOf),
        ("253:0", "8:240", Link::PartitionOf),
    ] {
        let expected = Some(Relation::RestsOn {
            upper: PathBuf::from(format!("/test/{upper}")),
            lower: PathBuf::from(format!("/test/{lower}")),
            through,
        });
        assert_eq!(related(upper, lower), expected);
        assert_eq!(related(lower, upper), expected);
    }
    assert_eq!(related("8:241", "8:242"), None);
    assert_eq!(related("253:0", "253:1"), None);
    assert_eq!(related("253:0", "8:242"), None);
}

#[test]
fn file_is_related_to_every_device_under_its_file_system() {
    let machine = disk("file");
    let file = machine.file("cache");
    let Target::File { on, .. } = &file else { panic!() };
    machine.device("dm-0", "253:0").stack("dm-0", "sdx1").device("sdy", "65:0");
    // Our file's own file system, said to be on dm-0.
    machine.mount(&on.to_string(), "/srv", "ext4", "/dev/dm-0");
    let directory = fs::canonicalize(machine.root.join("sys/class/block/dm-0")).unwrap();
    symlink(directory, machine.root.join("sys/dev/block").join(on.to_string())).unwrap();
    let found = machine.host.related(&file, &block("8:240")).unwrap().unwrap();
    assert!(matches!(found, Relation::RestsOn { through: Link::PartitionOf, .. }));
    let found = machine.host.related(&block("253:0"), &file).unwrap().unwrap();
    let text = found.to_string();
    assert!(text.ends_with("cache is on the file system that /test/253:0 has mounted at /srv"));
    assert_eq!(machine.host.related(&file, &block("65:0")).unwrap(), None);
    let other = machine.file("other");
    assert_eq!(machine.host.related(&file, &other).unwrap(), None);
    assert_eq!(machine.host.related(&file, &file).unwrap(), Some(Relation::Same));
}

#[test]
fn loop_device_is_related_to_its_file_and_to_what_the_file_is_on() {
    let machine = disk("loopfile");
    let file = machine.file("image");
    let Target::File { on, .. } = &file else { panic!() };
    machine.device("loop3", "7:3");
    machine.set("loop3", "loop/backing_file", &file.path().display().to_string());
    machine.mount(&on.to_string(), "/srv", "ext4", "/dev/sdx1");
    let directory = fs::canonicalize(machine.root.join("sys/class/block/sdx1")).unwrap();
    symlink(directory, machine.root.join("sys/dev/block").join(on.to_string())).unwrap();
    let found = machine.host.related(&block("7:3"), &file).unwrap().unwrap();
    assert!(matches!(found, Relation::RestsOn { through: Link::LoopOf, .. }));
    assert!(machine.host.related(&block("7:3"), &block("8:240")).unwrap().is_some());
}

#[test]
fn walk_ends_on_a_machine_that_stands_on_itself() {
    let machine = disk("circle");
    machine.device("dm-0", "253:0").device("dm-1", "253:1");
    machine.stack("dm-0", "dm-1").stack("dm-1", "dm-0");
    assert_eq!(machine.host.related(&block("253:0"), &block("8:240")).unwrap(), None);
}

#[test]
fn directory_and_character_device_are_not_storage() {
    for path in ["/", "/dev/null"] {
        let error = check_free(Path::new(path)).unwrap_err();
        assert!(matches!(error, GuardError::Target(TargetError::NotStorage { .. })), "{error}");
    }
}

/// A real file, loop device, file system and mount.
#[test]
fn real_loop_device_is_free_until_mounted_and_its_file_never() {
    let root = std::env::temp_dir().join(format!("forebay-guard-real-{}", std::process::id()));
    fs::create_dir_all(root.join("mnt")).unwrap();
    let image = root.join("image");
    fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    check_free(&image).unwrap();
    let device =
        match LoopDevice::attach(&image, LoopOptions { autoclear: true, ..LoopOptions::default() })
        {
            Ok(device) => device,
            Err(error) => {
                forebay_testing::skip(&format!("guard: no loop device: {error}"));
                fs::remove_dir_all(root).unwrap();
                return;
            }
        };
    let path = device.path().to_owned();
    let text = path.display().to_string();
    check_free(&path).unwrap();
    let error = check_free(&image).unwrap_err();
    assert!(matches!(error, GuardError::LoopBacked { .. }), "{error}");
    let found = related(&path, &image).unwrap().unwrap();
    assert!(matches!(found, Relation::RestsOn { through: Link::LoopOf, .. }), "{found}");

    // G2: a holder that no table names.
    let held = rustix::fs::open(&path, OFlags::RDONLY | OFlags::EXCL, Mode::empty()).unwrap();
    assert!(matches!(check_free(&path), Err(GuardError::Busy { .. })));
    drop(held);
    check_free(&path).unwrap();

    let mount_point = root.join("mnt").display().to_string();
    if run("mkfs.ext4", &["-q", &text]) && run("mount", &[&text, &mount_point]) {
        let error = check_free(&path).unwrap_err();
        assert!(error.to_string().contains(&mount_point), "{error}");
        let error = check_free(&image).unwrap_err();
        assert!(error.to_string().contains(&mount_point), "{error}");
        let cache = root.join("mnt/cache");
        fs::write(&cache, "").unwrap();
        for lower in [&path, &image] {
            let found = related(&cache, lower).unwrap().unwrap();
            println!("{found}");
            assert!(matches!(found, Relation::RestsOn { .. }));
        }
        assert!(run("umount", &[&mount_point]));
        check_free(&path).unwrap();
    }
    device.detach().unwrap();
    check_free(&image).unwrap();
    fs::remove_dir_all(root).unwrap();
}
