"""Routes about the fleet and its members: health, summary, nodes, pairing, groups, topology, kvfs, tokens, prefill."""

from __future__ import annotations

from typing import Final

from dashboard import api_types as api
from dashboard import present, summary
from dashboard.fleet_view import FleetView, NodeStatus
from dashboard.http import Access, Call, Route
from dashboard.pairing import Claim
from dashboard.state import NotThere, Registration


def health(call: Call) -> api.Health:
    def ask(view: FleetView, now: float) -> api.Health:
        entries = view.nodes(now)
        return api.Health(
            status="ok",
            online_nodes=sum(entry.status is NodeStatus.ONLINE for entry in entries),
            cache_bytes_used=summary.cache_bytes_used(entries),
            bus=view.bus_state(now).value,
        )

    return call.services.fleet.read(ask)


def summarise(call: Call) -> api.Summary:
    services = call.services
    registrations = _registrations(call)
    groups = len(services.state.groups())
    reported = services.state.reported_tokens()

    def ask(view: FleetView, now: float) -> api.Summary:
        who = present.eyes(view, now, admin=call.admin)
        registered = len(present.nodes(view.nodes(now), registrations, who))
        return summary.summary(view, now, who, reported, registered=registered, groups=groups)

    return services.fleet.read(ask)


def nodes(call: Call) -> list[api.Node]:
    registrations = _registrations(call)
    return call.services.fleet.read(
        lambda view, now: present.nodes(view.nodes(now), registrations, present.eyes(view, now, admin=call.admin))
    )


def _registrations(call: Call) -> list[Registration]:
    return call.services.state.registrations(call.services.wall_clock())


def register(call: Call) -> api.Registered:
    body: api.RegisterBody = call.body
    made, token = call.services.state.register(body.alias, body.address, body.region, body.role, call.services.wall_clock())
    return api.Registered(
        id=made.id,
        alias=made.alias,
        address=made.address,
        region=made.region,
        role=made.role,
        status="pending",
        pairing_token=token,
        created_at=made.created_at,
        expires_at=made.expires_at,
    )


def redeem(call: Call) -> api.Paired:
    body: api.RedeemBody = call.body
    claim = Claim(
        token_id=body.token_id,
        node_id=body.node_id,
        public_key=bytes.fromhex(body.public_key),
        proof=bytes.fromhex(body.proof),
        signature=bytes.fromhex(body.signature),
    )
    bound = call.services.state.redeem(claim, call.services.wall_clock())
    return api.Paired(
        id=bound.id, alias=bound.alias, region=bound.region, role=bound.role, status="paired", node_id=claim.node_id
    )


def remove_registration(call: Call) -> api.Removed:
    call.services.state.remove_registration(call.path["registration_id"])
    return api.Removed(status="removed")


def groups(call: Call) -> list[api.GroupMembers]:
    by_id = {node.id: node for node in nodes(call)}
    by_alias = {node.alias: node for node in by_id.values()}
    answer = []
    for group in call.services.state.groups():
        members = [node for name in group.node_ids if (node := by_id.get(name) or by_alias.get(name)) is not None]
        answer.append(
            api.GroupMembers(
                id=group.id,
                name=group.name,
                node_ids=list(group.node_ids),
                created_at=group.created_at,
                members=members,
                online=sum(node.status == "online" for node in members),
            )
        )
    return answer


def create_group(call: Call) -> api.Group:
    body: api.GroupBody = call.body
    made = call.services.state.create_group(body.name, body.node_ids, call.services.wall_clock())
    return api.Group(id=made.id, name=made.name, node_ids=list(made.node_ids), created_at=made.created_at)


def topology(call: Call) -> api.Topology:
    edges = [
        api.Edge(source=group.node_ids[0], target=target, group_id=group.id)
        for group in call.services.state.groups()
        for target in group.node_ids[1:]
    ]
    return api.Topology(nodes=nodes(call), edges=edges)


def kvfs(call: Call) -> api.Namespace:
    return call.services.fleet.read(
        lambda view, now: summary.namespace(view.nodes(now), present.eyes(view, now, admin=call.admin))
    )


def tokens(call: Call) -> api.Tokens:
    reported = call.services.state.reported_tokens()
    return call.services.fleet.read(lambda view, now: summary.tokens(view.totals(), reported))


def prefill(call: Call) -> dict[str, api.Figure]:
    return call.services.fleet.read(lambda view, now: summary.prefill(view, now, present.eyes(view, now, admin=call.admin)))


def report_tokens(call: Call) -> api.Accepted:
    body: api.TokensBody = call.body
    call.services.state.add_tokens(body.node_id, body.completed, body.kv_assisted)
    return api.Accepted(status="accepted")


def capture(call: Call) -> None:
    raise NotThere("no primary offers to capture prompts")


_V1: Final = "/v1/network"
ROUTES: Final = (
    Route("GET", "/healthz", health, "Whether the dashboard serves, and the least about the fleet", api.Health),
    Route("GET", f"{_V1}/summary", summarise, "The fleet in sums", api.Summary),
    Route("GET", f"{_V1}/nodes", nodes, "Every node that is heard or registered", list[api.Node]),
    Route(
        "POST",
        f"{_V1}/nodes/register",
        register,
        "Register a node; the answer holds its pairing token, once",
        api.Registered,
        Access.WRITE,
        body=api.RegisterBody,
        errors=(400,),
        counted=True,
    ),
    Route(
        "POST",
        f"{_V1}/nodes/register/redeem",
        redeem,
        "A node proves its pairing token and its key, which binds it to the registration",
        api.Paired,
        Access.PROOF,
        body=api.RedeemBody,
        errors=(401, 404, 409),
        counted=True,
    ),
    Route(
        "DELETE",
        f"{_V1}/nodes/register/<registration_id>",
        remove_registration,
        "Forget a registration and the key it binds",
        api.Removed,
        Access.WRITE,
        errors=(404,),
    ),
    Route("GET", f"{_V1}/groups", groups, "Groups with the members that exist now", list[api.GroupMembers]),
    Route(
        "POST",
        f"{_V1}/groups",
        create_group,
        "Create a group; its members need not exist",
        api.Group,
        Access.WRITE,
        body=api.GroupBody,
        errors=(400,),
    ),
    Route("GET", f"{_V1}/topology", topology, "Nodes, and a star of edges for each group", api.Topology),
    Route("GET", f"{_V1}/kvfs", kvfs, "The namespace of the fleet's KV and its mounts", api.Namespace),
    Route("GET", f"{_V1}/tokens", tokens, "Tokens generated and reused", api.Tokens),
    Route("GET", f"{_V1}/prefill", prefill, "Prefill counters of all nodes", dict[str, api.Figure]),
    Route(
        "POST",
        f"{_V1}/telemetry/tokens",
        report_tokens,
        "Add to the counted tokens",
        api.Accepted,
        Access.WRITE,
        body=api.TokensBody,
        errors=(400,),
    ),
    Route(
        "GET",
        f"{_V1}/maintenance/capture",
        capture,
        "State of the capture queue of a primary; 404 while none offers one",
        dict[str, int],
        Access.ADMIN,
        errors=(404,),
    ),
    Route(
        "POST",
        f"{_V1}/maintenance/capture/drain",
        capture,
        "Take prompts out of the capture queue of a primary; 404 while none offers one",
        dict[str, int],
        Access.ADMIN,
        body=api.DrainBody,
        errors=(404,),
    ),
)
