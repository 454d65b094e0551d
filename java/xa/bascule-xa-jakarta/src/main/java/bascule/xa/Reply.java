package bascule.xa;

import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.TextMessage;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;

/** The broker's answer to a request about branches. */
final class Reply {
    static final String COMMITTED = "committed";
    static final String ROLLED_BACK = "rolled-back";
    /** The branch may have ended either way: the broker remembers the last ends only. */
    static final String FORGOTTEN = "forgotten";

    private static final String CODE = "xaCode";
    private static final String POSITION = "position";

    /** XA_OK, XA_RDONLY, or the error code of an XAException. */
    final int code;
    final String description;
    /** How a branch that is gone has ended; null if the broker does not say it. */
    final String outcome;
    /** How far the broker's journal was. */
    final long position;
    final String text;

    Reply(Message answer) throws JMSException {
        if (!answer.propertyExists(CODE)) {
            throw new JMSException("the answer has no property " + CODE + ": the peer is no Bascule broker");
        }
        code = answer.getIntProperty(CODE);
        description = answer.getStringProperty("statusDescription");
        outcome = answer.getStringProperty("outcome");
        position = answer.propertyExists(POSITION) ? answer.getLongProperty(POSITION) : 0;
        text = answer instanceof TextMessage ? ((TextMessage) answer).getText() : "";
    }

    boolean succeeded() {
        return code == XAResource.XA_OK || code == XAResource.XA_RDONLY;
    }

    boolean rolledBack() {
        return code >= XAException.XA_RBBASE && code <= XAException.XA_RBEND;
    }

    /** Returns whether the branch is gone, and the broker remembers how it has ended: so, or perhaps so. */
    boolean hasEnded(String how) {
        return code == XAException.XAER_NOTA && how.equals(outcome);
    }
}
