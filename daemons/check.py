"""What can be found wrong with a daemon's settings without starting it: for install scripts and careful people."""

from __future__ import annotations

from pathlib import Path

from daemons.addresses import check_addresses
from daemons.engine_host import model_folder, need_model_libraries, parse_assertions
from kakeya_zmq.codecs.registry import storage_codec
from kakeya_zmq.config import ResolvedSettings
from kakeya_zmq.model.loader import read_config
from kakeya_zmq.model.revision import weight_files
from kakeya_zmq.roster import Roster
from wire.keyring import KeyRing


def check_settings(resolved: ResolvedSettings) -> None:
    """Read what a daemon with these settings would read first; nothing is made, bound or loaded.

    Raises:
        ConfigError: an address, port range, assertion, codec or the roster cannot be used.
        SecretFileError: the PSK is missing, unreadable, too short or readable by others.
        ModelError: there is no usable model folder, a weight file is missing or cut off, or there is no MLX.
    """
    settings = resolved.settings
    KeyRing.load(Path(settings.fleet_psk_file))
    Roster.load_if_any(Path(settings.roster_file), named=settings.roster_is_named)
    check_addresses(resolved)
    if settings.role != "cache":
        need_model_libraries()
        check_model_folder(model_folder(settings))
        parse_assertions(settings.assert_compatibility)
        storage_codec(settings.cache_compression, q_range=settings.lattice_q)


def check_model_folder(folder: Path) -> None:
    """Whether there is a model in it whose weight files are all there in full; only their headers are read.

    Raises:
        ModelError: something is missing or broken; the line names what.
    """
    read_config(folder)
    weight_files(folder)
